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
from itertools import groupby
from typing import TYPE_CHECKING

from ablate.base.errors import Problem, UserError, likely
from ablate.base.user_functions import code_digest
from ablate.recipes import describe_layer
from ablate.recipes.coverage import coverage_faults
from ablate.recipes.place import LayerPlace, phases_of
from ablate.run.architecture import layer_places
from ablate.run.command import Command, digest_of
from ablate.study.checks import layer_misfits, phase_misfits

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        self._outlines: dict[tuple[ModelConfig, int, int], Outline] = {}

    def read(self, arm: ResolvedArm, vocab_size: int) -> tuple[str | None, Outline | None]:
        """Hash an arm's own code and its model's files, and outline its model, checked against its recipe.

        The hash is None for an arm with neither, the outline for a built-in model.

        Raises:
            UserError: there is no such code or model, it cannot be built, or it does not fit the recipe.
        """
        model, parts = arm.model, []
        if model.hf is not None:
            from ablate.data.hub import hf_digest

            with self._at(arm, "model"):
                parts.append(hf_digest(model))
        for part, code in (("model", model.function), ("trainer", arm.trainer)):
            if code is not None:
                with self._at(arm, part):
                    parts.append(digest_of(code) if isinstance(code, Command) else self._code(code))
        digest = hashlib.sha256(" ".join(parts).encode()).hexdigest() if parts else None
        if model.is_built_in:
            return digest, None
        key = model, vocab_size, arm.training.seq_len
        if key not in self._outlines:
            from ablate.models.custom_models import outline

            with self._at(arm, "model"):
                self._outlines[key] = outline(model, vocab_size=vocab_size, seq_len=key[2])
        found = self._outlines[key]
        unreached = coverage_faults(arm.recipe, found.matrices, allow=model.allow)
        misfits = (
            *layer_misfits(arm.recipe, found.layers),
            *phase_misfits(arm.recipe, arm.training.tokens),
        )
        for part, faults in (("allow", unreached), ("recipe", [one[:2] for one in misfits])):
            with self._at(arm, part):
                if said := [Problem(what=f"{what}; arm '{arm.name}'", hint=hint) for what, hint in faults]:
                    raise UserError(*said)
        return digest, found

    @contextmanager
    def _at(self, arm: ResolvedArm, part: str) -> Iterator[None]:
        """Add the study's line to problems without a place."""
        try:
            yield
        except UserError as error:
            study, at = self._study, self._study.where(arm, part)
            placed = (one if one.file else study.problem(at, one.what, one.hint) for one in error.problems)
            raise UserError(*placed) from error


def check_diagnosed(study: Study, arms: dict[str, PlannedArm]) -> None:
    """Check ``diagnostics`` of a study.

    Raises:
        UserError: a pattern that matches no layer of any arm.
    """
    if study.diagnostics is None:
        return
    found = []
    known = list(dict.fromkeys(layer.name for arm in arms.values() for layer in arm.layers))
    patterns = [] if isinstance(study.diagnostics.layers, str) else study.diagnostics.layers
    for index, pattern in enumerate(patterns):
        if not any(fnmatchcase(name, pattern) for name in known):
            hint = likely(pattern, known, f"layers: {', '.join(known[:4])}, …")
            what = f"diagnostics.layers: '{pattern}' names no layer of any arm"
            found.append(study.problem(("diagnostics", "layers", index), what, hint))
    if found:
        raise UserError(*found)


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
def layer_groups(recipe: Recipe, layers: tuple[LinearLayer, ...], total_tokens: int) -> list[LayerGroup]:
    """Group a model's layers by recipe, over the whole budget, and by role, in the order of the model."""
    by_text: dict[str, dict[str | None, list[LayerPlace]]] = {}
    for place in layer_places(layers).values():
        phases = phases_of(recipe, place)
        texts = [(phase.start(total_tokens), describe_layer(phase.recipe)) for phase in phases]
        text = ", ".join(f"from token {start:,}: {what}" if start else what for start, what in texts)
        by_text.setdefault(text, {}).setdefault(place.role, []).append(place)
    return [
        LayerGroup(names=_with_ranges(members), count=len(members), recipe=text, role=role)
        for text, by_role in by_text.items()
        for role, members in by_role.items()
    ]


def _with_ranges(members: list[LayerPlace]) -> tuple[str, ...]:
    """Name layers by kind, blocks as ranges, experts in short: ``blocks.0-3.ffn.experts.*.down``."""
    kinds: dict[str, set[int]] = {}
    for place in members:
        kind = _NUMBER.sub("*", _NUMBER.sub("{}", place.name, count=1))  # the first is the block
        kinds.setdefault(kind, set()).update(() if place.block is None else (place.block,))
    names = []
    for kind, blocks in kinds.items():
        by_gap = groupby(enumerate(sorted(blocks)), key=lambda pair: pair[1] - pair[0])
        runs = [list(run) for _, run in by_gap]
        spans = (f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else str(run[0][1]) for run in runs)
        names.append(kind.format(",".join(spans)))
    return tuple(names)
