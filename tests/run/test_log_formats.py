"""The registry of formats: what the documentation lists of it, and what counts as a divergence."""

import re
from pathlib import Path

import pytest

from ablate.run.log_formats import DIVERGED, FORMATS

LOGS = Path(__file__).parents[2] / "docs" / "logs.md"


def test_the_page_on_logs_lists_each_format_and_the_version_that_was_read():
    page = LOGS.read_text()
    for name, form in FORMATS.items():
        assert f"| `{name}` | {form.about} | {form.read_in} |" in page


@pytest.mark.parametrize(
    ("line", "is_divergence"),
    [
        (
            "AssertionError: Rank 3: found NaN in local forward loss calculation. Device: 3, node: a",
            True,
        ),
        (
            "ValueError: The loss returned in `training_step` is tensor(nan, device='cuda:0').",
            True,
        ),
        (
            "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting",
            True,
        ),
        ("RuntimeError: Loss is nan, stopping", True),
        ("FloatingPointError: non-finite training loss", True),
        ("WARNING loss is nan, skipping the step", False),
        ("  check_for_nan_in_loss_and_grad ............ True", False),
        ("number of nan iterations:   0 |", False),
    ],
)
def test_what_trainers_print_of_a_divergence(line, is_divergence):
    assert any(re.search(pattern, line) for pattern in DIVERGED) == is_divergence
