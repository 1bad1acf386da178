"""A training function of the user's own, held to what a result is read from: rows, end, and recipe state.

How it fails: ``UserError`` in one line for a row or an end that the plan does not have, and at the end of a
function that did not apply its arm's recipe or never advanced its state: that run is not the arm's.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, get_args

from ablate.base.errors import UserError
from ablate.base.user_functions import load_function
from ablate.layers.state import recorded_states
from ablate.recipes import GEMMS
from ablate.run.schedule import plan_steps
from ablate.train import TrainResult
from ablate.train.loop import End

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ablate.recipes import Recipe
    from ablate.run.config import RunConfig

_ROWS = {
    "train": "{'kind': 'train', 'tokens': 4096, 'step': 1, 'loss': 5.5}",
    "eval": "{'kind': 'eval', 'tokens': 4096, 'step': 1, 'val_loss': 5.2}",
}
_ENDS = get_args(End)


def call(
    name: str,
    config: RunConfig,
    on_metrics: Callable[[dict[str, Any]], None],
    *,
    follows: bool = False,
    **options: Any,
) -> TrainResult:
    """Call the function ``name`` as the built-in trainer is called, and check what it hands over.

    ``follows``: on several devices another process is the first, whose rows alone count.

    Raises:
        UserError: no such function; a malformed row or end, or one that is not the plan's; a recipe that was
            not applied; or a state that was never advanced.
        Exception: whatever the function raises.
    """
    kept = options["checkpoints"].load() if "checkpoints" in options else None
    rows = _Rows(name, plan_steps(config.training).tokens, 0 if kept is None else kept.step)

    def check(row: object) -> None:
        checked = checked_row(row, name)
        rows.check(checked)
        on_metrics(checked)

    with recorded_states() as states:
        result = load_function(name)(config, check, **options)
    if not isinstance(result, TrainResult) or result.state not in _ENDS:
        end = repr(result.state) if isinstance(result, TrainResult) else f"a {type(result).__name__}"
        hint = f"expected TrainResult(state=…, tokens=…, step=…) with a state of {', '.join(_ENDS)}"
        raise UserError(f"trainer {name} returned {end}", hint=hint)
    if result.state == "finished" or result.step > 1:
        for fault in filter(None, (state.fault() for state in states)):
            raise UserError(f"trainer {name} {fault}")
        _check_recipe(name, config.recipe, [state.recipe for state in states], result)
    if result.state == "finished" and not follows:
        rows.check_end(result, config.training.tokens)
    return result


@dataclass
class _Rows:
    """The rows of an attempt that goes on after ``step``, held to the plan: they rise up to its budget."""

    name: str
    budget: int
    step: int
    last: dict[str, int] = field(default_factory=lambda: {"train": -1, "eval": -1})

    def check(self, row: dict[str, Any]) -> None:
        kind, tokens = row["kind"], row["tokens"]
        if tokens > self.budget:
            raise _fault(self.name, f"a row at {tokens:,} tokens", f"the plan ends at {self.budget:,}")
        if tokens <= self.last[kind] or tokens < max(self.last.values()):
            before = self.last[kind] if tokens <= self.last[kind] else max(self.last.values())
            what = f"a row of kind '{kind}' at {tokens:,} tokens after one at {before:,}"
            raise _fault(self.name, what, "expected tokens that rise, and one row of a kind at each step")
        if row["step"] < self.step:
            what = f"a row of step {row['step']}, though the run goes on after step {self.step}"
            raise _fault(self.name, what, "begin with what checkpoints.load() returns")
        self.last[kind] = tokens

    def check_end(self, result: TrainResult, asked: int) -> None:
        """Check that a finished run trained to the plan's end and was evaluated there."""
        end = f"expected the plan's end: {self.budget:,} tokens, as plan_steps(config.training).tokens"
        if not asked <= result.tokens <= self.budget:
            raise UserError(f"trainer {self.name} finished at {result.tokens:,} tokens", hint=end)
        evaluated = self.last["eval"]
        if evaluated < asked and result.step > self.step:
            at = f"its last evaluation at {evaluated:,} tokens" if evaluated >= 0 else "no evaluation"
            raise UserError(f"trainer {self.name} finished with {at}", hint=end)


def _check_recipe(name: str, asked: Recipe, applied: Sequence[Recipe], result: TrainResult) -> None:
    """Raise if a function trained with another recipe than its arm's, as far as it can be known."""
    found = [*applied, *([] if result.recipe is None else [result.recipe])]
    if any(recipe.text == asked.text for recipe in found):
        return
    if not found and all(getattr(part, gemm).is_untouched for part in asked.parts for gemm in GEMMS):
        return
    what = "called apply_recipe with another recipe than its arm's" if found else "never called apply_recipe"
    raise UserError(
        f"trainer {name} {what}: its run is not the arm's",
        hint="apply config.recipe; who applies it otherwise says so by TrainResult(recipe=config.recipe, …)",
    )


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
