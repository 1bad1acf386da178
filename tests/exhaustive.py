"""Parameters of which only some run with the README's command."""

import pytest


def rest_exhaustive(values, usual, ids=str):
    """Make parameters of values; only those that ``usual`` accepts run in the usual tests."""
    return [
        pytest.param(
            value, id=ids(value), marks=[] if usual(value) else [pytest.mark.exhaustive]
        )
        for value in values
    ]
