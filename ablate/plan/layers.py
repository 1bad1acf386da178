"""The layers of each arm's model: whether recipes fit them, and which recipe each layer carries.

Loading has checked the recipes of built-in models. The user's own models and trainers get a digest and an
outline here; the model is built without memory, which imports torch. ``diagnostics:`` is checked here,
because it can name layers of any model.

How it fails: ``UserError`` at the line of the study that names the code, model, pattern or recipe.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from ablate.base.errors import UserError, likely
from ablate.base.user_functions import code_digest
from ablate.recipes import describe_layer
from ablate.recipes.coverage import coverage_faults
from ablate.recipes.place import LayerPlace, phases_of
from ablate.run import command_files
from ablate.run.architecture import layer_places
from ablate.run.command import Command
from ablate.study.checks import layer_misfits, phase_misfits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ablate.models.custom_models import Outline
    from ablate.plan.plan import PlannedArm
    from ablate.recipes import Recipe
    from ablate.run.architecture import LinearLayer
    from ablate.run.config import ModelConfig
    from ablate.study import ResolvedArm, Study


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


class OwnCode:
    """Digests and outlines of a study's own models and trainers, each computed once for all arms."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self._code = cache(code_digest)
        self._code_of = cache(command_files.code_of)
        self._baseline = next(arm for arm in study.arms if arm.name == study.baseline)
        self._outlines: dict[tuple[ModelConfig, int, int], Outline] = {}

    def read(
        self, arm: ResolvedArm, vocab_size: int
    ) -> tuple[str | None, Outline | None]:
        """Hash an arm's own code and its model's files, and outline its model, checked against its recipe.

        The hash is None for an arm with neither, the outline for a built-in model.

        Raises:
            UserError: there is no such code or model, it cannot be built, or it does not fit the recipe.
        """
        digest = self._digest(arm)
        model = arm.model
        if model.is_built_in:
            return digest, None
        key = (model, vocab_size, arm.training.seq_len)
        if key not in self._outlines:
            from ablate.models.custom_models import outline

            with self._at(arm, "model"):
                self._outlines[key] = outline(
                    model, vocab_size=vocab_size, seq_len=arm.training.seq_len
                )
        outlined = self._outlines[key]
        faults = coverage_faults(arm.recipe, outlined.matrices, allow=model.allow)
        self._refuse(arm, "allow", faults)
        misfits = [
            *layer_misfits(arm.recipe, outlined.layers),
            *phase_misfits(arm.recipe, arm.training.tokens),
        ]
        self._refuse(
            arm, "recipe", [(misfit.message, misfit.hint) for misfit in misfits]
        )
        return digest, outlined

    def _digest(self, arm: ResolvedArm) -> str | None:
        digests = []
        model = arm.model
        trainer = arm.trainer
        with self._at(arm, "model"):
            if model.hf is not None:
                from ablate.data.hub import hf_digest

                digests.append(hf_digest(model))
            if model.function is not None:
                digests.append(self._code(model.function))
        with self._at(arm, "trainer"):
            if isinstance(trainer, Command):
                digests.append(command_files.digest_of(trainer))
                if arm.code != self._baseline.code and self.changed_code(arm):
                    code = self._code_of(trainer)
                    digests.append(command_files.code_digest(code))
            elif trainer is not None:
                digests.append(self._code(trainer))
        if digests:
            return hashlib.sha256(" ".join(digests).encode()).hexdigest()
        return None

    def changed_code(self, arm: ResolvedArm) -> list[str]:
        """List the files in which an arm's code differs from the baseline's, if commands train both."""
        trainer = arm.trainer
        baseline = self._baseline.trainer
        if not (isinstance(trainer, Command) and isinstance(baseline, Command)):
            return []
        hashes = self._code_of(trainer).items() ^ self._code_of(baseline).items()
        words = command_files.changed_words(trainer, baseline)
        return sorted({*dict(hashes), *words})

    def _refuse(
        self, arm: ResolvedArm, part: str, faults: Iterable[tuple[str, str | None]]
    ) -> None:
        place = self._study.where(arm, part)
        problems = []
        for message, hint in faults:
            text = f"{message}; arm '{arm.name}'"
            problems.append(self._study.source.problem(place, text, hint))
        if problems:
            raise UserError(*problems)

    @contextmanager
    def _at(self, arm: ResolvedArm, part: str) -> Iterator[None]:
        """Add the study's line to problems without a place."""
        try:
            yield
        except UserError as error:
            place = self._study.where(arm, part)
            problems = [
                problem
                if problem.file
                else self._study.source.problem(place, problem.what, problem.hint)
                for problem in error.problems
            ]
            raise UserError(*problems) from error


def check_diagnosed(study: Study, arms: dict[str, PlannedArm]) -> None:
    """Check ``diagnostics`` of a study.

    Raises:
        UserError: a pattern that matches no layer of any arm.
    """
    diagnostics = study.diagnostics
    if diagnostics is None or isinstance(diagnostics.layers, str):
        return
    problems = []
    known = list(
        dict.fromkeys(layer.name for arm in arms.values() for layer in arm.layers)
    )
    for index, pattern in enumerate(diagnostics.layers):
        if not any(fnmatchcase(name, pattern) for name in known):
            hint = likely(pattern, known, f"layers: {', '.join(known[:4])}, …")
            message = f"diagnostics.layers: '{pattern}' names no layer of any arm"
            place = ("diagnostics", "layers", index)
            problems.append(study.source.problem(place, message, hint))
    if problems:
        raise UserError(*problems)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroup:
    """Layers of one role with the same recipe: their names, as ``blocks.0-3.ffn.down``, and their number.

    ``role``: None if their names do not say it.
    """

    names: tuple[str, ...]
    count: int
    recipe: str
    role: str | None


@lru_cache(maxsize=256)  # the cells of a grid share most of theirs
def layer_groups(
    recipe: Recipe, layers: tuple[LinearLayer, ...], total_tokens: int
) -> list[LayerGroup]:
    """Group a model's layers by recipe, over the whole budget, and by role, in the order of the model."""
    members: dict[str, dict[str | None, list[LayerPlace]]] = {}
    for place in layer_places(layers).values():
        roles = members.setdefault(_recipe_text(recipe, place, total_tokens), {})
        roles.setdefault(place.role, []).append(place)
    groups = []
    for text, roles in members.items():
        for role, places in roles.items():
            names = _with_ranges(places)
            group = LayerGroup(names=names, count=len(places), recipe=text, role=role)
            groups.append(group)
    return groups


def _recipe_text(recipe: Recipe, place: LayerPlace, total_tokens: int) -> str:
    texts = []
    for phase in phases_of(recipe, place):
        start = phase.start(total_tokens)
        text = describe_layer(phase.recipe)
        texts.append(f"from token {start:,}: {text}" if start else text)
    return ", ".join(texts)


def _with_ranges(members: list[LayerPlace]) -> tuple[str, ...]:
    """Name layers by kind, blocks as ranges, experts in short: ``blocks.0-3.ffn.experts.*.down``."""
    blocks_of: dict[str, set[int]] = {}
    for place in members:
        # the first is the block
        kind = _NUMBER.sub("*", _NUMBER.sub("{}", place.name, count=1))
        blocks = blocks_of.setdefault(kind, set())
        if place.block is not None:
            blocks.add(place.block)
    return tuple(
        kind.format(_ranges(sorted(blocks))) for kind, blocks in blocks_of.items()
    )


def _ranges(numbers: list[int]) -> str:
    """Write numbers as ranges: ``0-3,5``."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ",".join("-".join(map(str, ends)) for ends in ranges)
