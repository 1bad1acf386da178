"""Faults of rules that match no layer of the model, and of phases that never begin within the budget.

Without these faults such an arm would run under a name that is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from ablate.recipes.place import names_layer
from ablate.run.architecture import model_places
from ablate.run.config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ablate.recipes import Phase, Recipe
    from ablate.recipes.place import LayerPlace


@dataclass(frozen=True, kw_only=True)
class StageFault:
    """A fault in words, and the entry of ``layers`` or ``phases`` that causes it; None for all of them."""

    what: str
    hint: str
    index: int | None = None


def built_in_rule_faults(model: ModelConfig, recipe: Recipe) -> tuple[StageFault, ...]:
    """Return the faults of a recipe's rules for a built-in model's layers."""
    return _remembered(model.architecture, model.layers, model.experts, recipe) if recipe.rules else ()


@lru_cache(maxsize=256)  # for a grid's cells
def _remembered(
    architecture: Literal["llama", "gpt"], layers: int, experts: int | None, recipe: Recipe
) -> tuple[StageFault, ...]:
    named_alike = ModelConfig(architecture=architecture, layers=layers, experts=experts)
    return rule_faults(model_places(named_alike), recipe)


def rule_faults(where: Mapping[str, LayerPlace], recipe: Recipe) -> tuple[StageFault, ...]:
    """Return the faults of a recipe's rules for a model's layers."""
    if not recipe.rules:
        return ()
    naming = {
        name: [index for index, rule in enumerate(recipe.rules) if names_layer(rule, place)]
        for name, place in where.items()
    }
    names = list(where)
    found = []
    for index, rule in enumerate(recipe.rules):
        if not any(index in rules for rules in naming.values()):
            hint = f"its layers are {names[0]} … {names[-2]} and {names[-1]}"
            what = f"no layer of this model is called '{rule.match}'"
            found.append(StageFault(what=what, hint=hint, index=index))
        elif not any(rules[:1] == [index] for rules in naming.values()):
            what = "an entry that decides nothing: an earlier one names every layer that it names"
            found.append(StageFault(what=what, hint="put it first", index=index))
    no_layer_left = all(naming[name] for name, place in where.items() if not place.is_head)
    if no_layer_left and not recipe.is_high_precision:
        blocks = next(iter(where.values())).num_blocks
        what = f"rules name all {blocks} blocks of this model, so that the recipe's own GEMMs never run"
        hint = "set recipe.layers for a model of this depth, e.g. layers: [{last: 1, recipe: bf16}]"
        found.append(StageFault(what=what, hint=hint))
    return tuple(found)


def phase_faults(phases: tuple[Phase, ...], tokens: int) -> list[StageFault]:
    """Return the faults of phases for a budget of ``tokens``."""
    found = []
    before = 0
    for index, phase in enumerate(phases):
        start = phase.from_tokens or round((phase.from_fraction or 0) * tokens)
        if start >= tokens:
            what = f"a phase from token {start} on, but the budget is {tokens} tokens"
            found.append(StageFault(what=what, hint="it would never begin", index=index))
        elif start <= before:
            what = f"a phase from token {start} on, not after the one before it ({before})"
            found.append(StageFault(what=what, hint="phases stand in the order of their starts", index=index))
        before = max(before, start)
    return found
