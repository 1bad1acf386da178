"""Whether what ``diagnostics:`` names fits the layers of the arms: patterns of names, and other recipes.

How it fails: ``UserError`` at the pattern or recipe in the study's file.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ablate.base.errors import Problem, UserError, likely
from ablate.plan.custom_models import OWN_RULE, misfit
from ablate.run.architecture import layer_places
from ablate.study.shape_checks import phase_misfits, rule_misfits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.recipes import Recipe
    from ablate.run.architecture import LinearLayer
    from ablate.study import Study

    Layers = dict[str, tuple[LinearLayer, ...]]


def check_diagnosed(study: Study, layers: Layers) -> None:
    """Check ``diagnostics`` of a study; ``layers``: the linear layers of each arm's model, by arm.

    Raises:
        UserError: a pattern that matches no layer of any arm, or a recipe that does not fit an arm.
    """
    if study.diagnostics is None:
        return
    problems = [*_unknown_layers(study, layers), *_unfit_recipes(study, layers)]
    if problems:
        raise UserError(*problems)


def _unknown_layers(study: Study, layers: Layers) -> Iterator[Problem]:
    assert study.diagnostics is not None
    if isinstance(study.diagnostics.layers, str):
        return
    known = list(dict.fromkeys(layer.name for own in layers.values() for layer in own))
    for pattern, (line, column) in zip(study.diagnostics.layers, study.layer_lines, strict=True):
        if not any(fnmatchcase(name, pattern) for name in known):
            hint = likely(pattern, known, f"layers: {', '.join(known[:4])}, …")
            what = f"diagnostics.layers: '{pattern}' names no layer of any arm"
            yield Problem(file=study.shown_path, line=line, column=column, what=what, hint=hint)


def _unfit_recipes(study: Study, layers: Layers) -> Iterator[Problem]:
    """Yield the first fault of each recipe of ``what_if``; trainers of the user's own are not diagnosed."""
    assert study.diagnostics is not None
    recipes = study.diagnostics.other_recipes().values()
    for index, (recipe, (line, column)) in enumerate(zip(recipes, study.what_if_lines, strict=True)):
        for arm in study.arms:
            fault = _fault(recipe, layers[arm.name], arm.training.tokens) if arm.trainer is None else None
            if fault is not None:
                what, hint = fault
                what = f"diagnostics.what_if[{index}]: {what}; arm '{arm.name}'"
                yield Problem(file=study.shown_path, line=line, column=column, what=what, hint=hint)
                break


def _fault(recipe: Recipe, layers: tuple[LinearLayer, ...], tokens: int) -> tuple[str, str] | None:
    for one in (*rule_misfits(layer_places(layers), recipe), *phase_misfits(recipe, tokens)):
        return one.what, one.hint
    what = misfit(layers, recipe)
    return None if what is None else (what, OWN_RULE.format("layers"))
