"""A user's own training function, checked in all that a result is read from: rows, end, and recipe state.

How it fails: a row or an end that does not fit the plan is a ``UserError`` in one line. So is a function that
has ended and did not apply its arm's recipe, or never advanced its state: such a run is not the arm's.
"""

from __future__ import annotations

import inspect
import math
import operator
import reprlib
from typing import TYPE_CHECKING, Any, get_args

from ablate.base.errors import UserError
from ablate.base.user_functions import load_function
from ablate.layers.state import recorded_states
from ablate.recipes import GEMMS
from ablate.run.schedule import plan_steps
from ablate.train import TrainResult
from ablate.train.loop import End

if TYPE_CHECKING:
    from collections.abc import Callable

    from ablate.run.config import RunConfig

_COUNTS = ("tokens", "step")


def call(
    name: str,
    config: RunConfig,
    on_metrics: Callable[[dict[str, Any]], None],
    *,
    follows: bool = False,
    **options: Any,
) -> TrainResult:
    """Call the function ``name`` as the built-in trainer is called, and check its rows and its end.

    ``follows``: this process is not the first of several; only the first one's rows count.

    Raises:
        UserError: no such function; a row or an end that is malformed or does not fit the plan; a recipe that
            was not applied; or a state that was never advanced.
        Exception: whatever the function raises.
    """
    kept = options["checkpoints"].load() if "checkpoints" in options else None
    first = 0 if kept is None else kept.step
    budget, asked = plan_steps(config.training).tokens, config.training.tokens
    last = {"train": -1, "eval": -1}

    def check(row: object) -> None:
        checked = _checked_row(row)
        if checked is None:
            hint = "expected such as {'kind': 'eval', 'tokens': 4096, 'step': 1, 'val_loss': 5.2}, all finite"
            raise UserError(f"trainer {name} gave on_metrics {reprlib.repr(row)}", hint=hint)
        kind, tokens, step = checked["kind"], checked["tokens"], checked["step"]
        if tokens <= last[kind] or not max(last.values()) <= tokens <= budget or step < first:
            raise UserError(
                f"trainer {name} gave on_metrics a row of kind '{kind}' at step {step}, {tokens:,} tokens",
                hint=f"expected steps from {first} on, as by checkpoints.load(), and tokens that rise to "
                f"{budget:,}, the plan's end",
            )
        last[kind] = tokens
        on_metrics(checked)

    with recorded_states() as states:
        result = load_function(name)(config, check, **options)
    if not isinstance(result, TrainResult) or result.state not in get_args(End):
        hint = f"expected TrainResult(state=…, tokens=…, step=…) with a state of {', '.join(get_args(End))}"
        raise UserError(f"trainer {name} returned {reprlib.repr(result)}", hint=hint)
    if result.state == "finished" or result.step > 1:
        for fault in filter(None, (state.fault() for state in states)):
            raise UserError(f"trainer {name} {fault}")
        recipe = config.recipe
        applied = [
            one.text for one in (*(state.recipe for state in states), result.recipe) if one is not None
        ]
        is_plain = all(getattr(part, gemm).is_untouched for part in recipe.parts for gemm in GEMMS)
        if recipe.text not in applied and (applied or not is_plain):
            what = "called apply_recipe with another recipe" if applied else "applied no recipe"
            raise UserError(
                f"trainer {name} {what}: its run is not the arm's",
                hint="call apply_recipe with config.recipe; who applies it otherwise says so by "
                "TrainResult(recipe=config.recipe, …)",
            )
    if result.state == "finished" and not follows:
        is_evaluated = last["eval"] >= asked or result.step <= first
        if not asked <= result.tokens <= budget or not is_evaluated:
            raise UserError(
                f"trainer {name} finished at {result.tokens:,} tokens, last evaluated at {last['eval']:,}",
                hint=f"expected both at the plan's end: plan_steps(config.training).tokens, {budget:,}",
            )
    return result


def check_call(name: str) -> None:
    """Refuse a trainer that cannot be called as ``call`` does; it is imported, and not called.

    Raises:
        UserError: no such function, or one with other parameters.
    """
    options = dict.fromkeys(("tokens", "should_stop", "checkpoints", "device"))
    try:
        inspect.signature(load_function(name)).bind("config", "on_metrics", **options)
    except TypeError as error:
        hint = f"it is called as train(config, on_metrics, *, {', '.join(options)})"
        raise UserError(f"trainer {name}: {error}", hint=hint) from None


def _checked_row(row: Any) -> dict[str, Any] | None:
    """Return the row with plain numbers, for JSON; None if it is malformed or a number is not finite."""
    try:
        numbers = {
            key: operator.index(value) if key in _COUNTS else float(value)
            for key, value in row.items()
            if key != "kind"
        }
        needed = {"train": _COUNTS, "eval": (*_COUNTS, "val_loss")}[row["kind"]]
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    is_whole = all(key in numbers for key in needed) and all(map(math.isfinite, numbers.values()))
    return {"kind": row["kind"], **numbers} if is_whole else None
