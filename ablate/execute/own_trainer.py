"""A training function of the user's own, held to what a result is read from: rows, end, and recipe state.

How it fails: ``UserError`` in one line for a row that is none, for an end that is none, and at the end of a
function that trained with a recipe whose state it never advanced: that run is not the arm's.
"""

from __future__ import annotations

import math
import operator
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, get_args

from ablate.base.code import load_function
from ablate.base.errors import UserError
from ablate.layers.state import followed
from ablate.train import TrainResult
from ablate.train.loop import End

if TYPE_CHECKING:
    from collections.abc import Callable

    from ablate.run.config import RunConfig

_ROWS = {
    "train": "{'kind': 'train', 'tokens': 4096, 'step': 1, 'loss': 5.5}",
    "eval": "{'kind': 'eval', 'tokens': 4096, 'step': 1, 'val_loss': 5.2}",
}
_ENDS = get_args(End)


def call(
    name: str, config: RunConfig, on_metrics: Callable[[dict[str, Any]], None], **options: Any
) -> TrainResult:
    """Call the function ``name`` as the built-in trainer is called, and check what it hands over.

    Raises:
        UserError: no such function, a row or an end that is none, or a state that was never advanced.
        Exception: whatever the function raises.
    """

    def check(row: object) -> None:
        on_metrics(checked_row(row, name))

    with followed() as states:
        result = load_function(name)(config, check, **options)
    if not isinstance(result, TrainResult) or result.state not in _ENDS:
        end = repr(result.state) if isinstance(result, TrainResult) else f"a {type(result).__name__}"
        hint = f"expected TrainResult(state=…, tokens=…, step=…) with a state of {', '.join(_ENDS)}"
        raise UserError(f"trainer {name} returned {end}", hint=hint)
    if result.state == "finished" or result.step > 1:
        for fault in filter(None, (state.fault() for state in states)):
            raise UserError(f"trainer {name} {fault}")
    return result


def checked_row(row: object, name: str) -> dict[str, Any]:
    """Return a row of metrics as JSON takes it.

    Raises:
        UserError: it is no row, or holds what is no finite number.
    """
    fail = partial(_fault, name)
    if not isinstance(row, dict):
        raise fail(f"a {type(row).__name__}", f"expected a row such as {_ROWS['eval']}")
    kind = row.get("kind")
    if kind not in _ROWS:
        raise fail(f"a row of kind {kind!r}", "expected 'train' or 'eval'")
    if missing := [key for key in ("tokens", "step", *["val_loss"] * (kind == "eval")) if key not in row]:
        raise fail(f"a row without {missing[0]!r}", f"expected such as {_ROWS[kind]}")
    return {"kind": kind} | {key: _number(key, row[key], fail) for key in row if key != "kind"}


def _number(key: str, value: Any, fail: Callable[[str, str], UserError]) -> float:
    if key in ("tokens", "step"):
        try:
            count = -1 if isinstance(value, bool) else operator.index(value)
        except TypeError:
            count = -1
        if count < 0:
            raise fail(f"a row with {key} {value!r}", "expected a whole number, counted from the run's start")
        return count
    if isinstance(value, bool) or not isinstance(value, Real):
        hint = "expected a number, as loss.item()" if hasattr(value, "item") else "expected a number"
        raise fail(f"a row whose {key} is a {type(value).__name__}", hint)
    if not math.isfinite(value):
        hint = "send no such row; a run that blows up ends with TrainResult(state='diverged', …)"
        raise fail(f"a row whose {key} is {value}", hint)
    return float(value)


def _fault(name: str, what: str, hint: str) -> UserError:
    return UserError(f"trainer {name} gave on_metrics {what}", hint=hint)
