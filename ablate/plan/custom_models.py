"""What planning must know of the user's own code and models: a digest, and the model's layers.

Only studies with such code pay for this: the model is built without memory, which imports torch.

How it fails: ``UserError`` at the line of the study that names the code, model or recipe.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ablate.base.errors import Problem, UserError
from ablate.base.user_functions import code_digest
from ablate.recipes import features_fault
from ablate.recipes.coverage import coverage_faults
from ablate.recipes.place import phases_of
from ablate.run.architecture import layer_places
from ablate.study.shape_checks import rule_misfits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ablate.models.custom_models import Outline
    from ablate.recipes import Recipe
    from ablate.run.architecture import LinearLayer
    from ablate.study import ResolvedArm, Study

_Found = TypeVar("_Found")
OWN_RULE = "give the layer a rule of its own: {}: [{{match: …, recipe: bf16}}]"
"""The hint for a layer that a recipe does not fit, with the key of the recipe's rules to fill in."""


class Foreigners:
    """Digests and outlines for a study's arms, each computed once for all arms that share it."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self._digests: dict[tuple[object, ...], str | None] = {}
        self._outlines: dict[tuple[object, ...], Outline] = {}

    def digest(self, arm: ResolvedArm) -> str | None:
        """Return the hash of an arm's code and of its model's files, None if it has no code of the user's.

        Raises:
            UserError: there is no such code or model.
        """
        model = arm.model
        key = (arm.trainer, model.hf, model.pretrained, model.function)
        if key not in self._digests:
            parts = []
            if model.hf is not None:
                from ablate.models.hf_files import hf_digest

                parts.append(self._placed(arm, "model", lambda: hf_digest(model)))
            for part, function in (("model", model.function), ("trainer", arm.trainer)):
                if function is not None:
                    parts.append(self._placed(arm, part, partial(code_digest, function)))
            joined = hashlib.sha256(" ".join(parts).encode()).hexdigest()
            self._digests[key] = joined if parts else None
        return self._digests[key]

    def outline(self, arm: ResolvedArm, vocab_size: int) -> Outline | None:
        """Return the outline of an arm's model, checked against its recipe; None for a built-in model.

        Raises:
            UserError: the model cannot be built, or does not fit its recipe.
        """
        model = arm.model
        if model.is_built_in:
            return None
        key = (model, vocab_size, arm.training.seq_len)
        if key not in self._outlines:
            from ablate.models.custom_models import outline

            self._outlines[key] = self._placed(
                arm, "model", lambda: outline(model, vocab_size=vocab_size, seq_len=arm.training.seq_len)
            )
        found = self._outlines[key]
        if problems := list(self._problems(arm, found)):
            raise UserError(*problems)
        return found

    def _problems(self, arm: ResolvedArm, found: Outline) -> Iterator[Problem]:
        layers = found.layers
        for said, remedy in coverage_faults(arm.recipe, found.matrices, allow=arm.model.allow):
            yield self._at(arm, "allow", Problem(what=f"{said}; arm '{arm.name}'", hint=remedy))
        for fault in rule_misfits(layer_places(layers), arm.recipe):
            yield self._at(arm, "recipe", Problem(what=f"{fault.what}; arm '{arm.name}'", hint=fault.hint))
        if (what := misfit(layers, arm.recipe)) is not None:
            hint = OWN_RULE.format("recipe.layers")
            yield self._at(arm, "recipe", Problem(what=f"{what}; arm '{arm.name}'", hint=hint))

    def _placed(self, arm: ResolvedArm, part: str, find: Callable[[], _Found]) -> _Found:
        try:
            return find()
        except UserError as error:
            raise UserError(*(self._at(arm, part, problem) for problem in error.problems)) from error

    def _at(self, arm: ResolvedArm, part: str, problem: Problem) -> Problem:
        """Give a problem without a place the line of the study that leads to it."""
        if problem.file is not None:
            return problem
        line, column = arm.lines[part]
        return replace(problem, file=self._study.shown_path, line=line, column=column)


def misfit(layers: tuple[LinearLayer, ...], recipe: Recipe) -> str | None:
    """Describe the first features that a block, tile or Hadamard group does not divide."""
    where = layer_places(layers)
    for layer in layers:
        for phase in phases_of(recipe, where[layer.name]):
            fault = features_fault(phase.recipe, layer.name, inputs=layer.inputs, outputs=layer.outputs)
            if fault is not None:
                return fault
    return None
