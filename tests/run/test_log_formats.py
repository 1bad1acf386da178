"""The registry of formats: what the documentation lists of it, and what counts as a divergence."""

import re
from pathlib import Path

from ablate.run.log_formats import DIVERGED, FORMATS
from tests.golden import check_answers

LOGS = Path(__file__).parents[2] / "docs" / "logs.md"


def test_the_page_on_logs_lists_each_format_and_the_version_that_was_read():
    page = LOGS.read_text()
    for name, form in FORMATS.items():
        assert f"| `{name}` | {form.about} | {form.read_in} |" in page


def told(line):
    if any(re.search(pattern, line) for pattern in DIVERGED):
        yield "a divergence"
    else:
        yield "none"


def test_what_trainers_print_of_a_divergence():
    check_answers(Path(__file__).with_name("divergences.txt"), told)
