"""The registry of formats: what the documentation lists of it."""

from pathlib import Path

from ablate.run.log_formats import FORMATS

LOGS = Path(__file__).parents[2] / "docs" / "logs.md"


def test_the_page_on_logs_lists_each_format_and_the_version_that_was_read():
    page = LOGS.read_text()
    for name, form in FORMATS.items():
        assert f"| `{name}` | {form.about} | {form.read_in} |" in page
