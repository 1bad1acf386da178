"""A study after validation: every arm resolved, independent of the file's notation."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ablate.store.plan_file import Question

if TYPE_CHECKING:
    from pathlib import Path

    from ablate.recipes import Recipe, RecipeSpec
    from ablate.run.command import Command
    from ablate.run.config import (
        BackendName,
        DataConfig,
        ModelConfig,
        ResourcesConfig,
        TrainingConfig,
    )
    from ablate.run.diagnostics import Diagnostics
    from ablate.store.plan_file import ForkPoint
    from ablate.study.parts import Parts
    from ablate.study.search_space import Search, Tune
    from ablate.study.source import Path as Keys
    from ablate.study.source import Source

_FIELDS = {
    "model": ("model.hf", "model.function"),
    "allow": ("model.allow", "model.hf", "model.function"),
    "trainer": ("trainer",),
    "code": ("trainer.cwd", "trainer.files", "trainer"),
    "recipe": ("recipe.layers", "recipe"),
    "data": ("data.paths", "data.source", "data"),
    "tokenizer": ("data.tokenizer", "data.tokenizer_path", "data.vocab_size", "data"),
    "evaluation": (
        "training.eval_tokens", "training.eval_windows", "training.evaluate_in", "data.validation_paths",
    ),
    "device": ("resources.gpus",),
    "world_size": ("resources.devices_per_run",),
}  # fmt: skip
"""The fields to blame for faults of an arm that only planning can find."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedArm:
    """One arm. ``factors`` maps the paths that the arm or the grid set to their values, as written.

    ``trainer_spec``: a command without the flags of its recipe, as written.
    ``code``: the folder that replaces the command's, as written. ``parts``: those of the file that make it.
    """

    name: str
    description: str | None
    factors: dict[str, Any]
    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    recipe: Recipe
    recipe_spec: RecipeSpec
    backend: BackendName
    trainer: str | Command | None
    trainer_spec: str | Command | None
    code: str | None
    resources: ResourcesConfig
    fork: ForkPoint | None
    parts: Parts


def shared_fields(kind: type, content: object) -> dict[str, Any]:
    """Return the attributes of ``content`` that the dataclass ``kind`` has under the same names."""
    names = [field.name for field in fields(kind) if hasattr(content, field.name)]
    return {name: getattr(content, name) for name in names}


def again_name(baseline: str) -> str:
    """Return the name of the arm that ``baseline_again`` adds."""
    return f"{baseline} again"


@dataclass(frozen=True, kw_only=True)
class Study(Question):
    """A validated study. ``training`` is the base's section, which most arms share.

    ``folded``: cells of the grid with the same configuration as an arm, and its name.

    ``source``: the file's content, for the places of faults that only planning can find.
    """

    name: str
    seeds: tuple[int, ...]
    baseline_again: bool
    training: TrainingConfig
    arms: tuple[ResolvedArm, ...]
    folded: dict[str, str]
    diagnostics: Diagnostics | None
    path: Path
    source: Source
    keep_weights: bool = False
    tune: Tune | None = None
    search: Search | None = None

    def where(self, arm: ResolvedArm, part: str) -> Keys:
        """Find where the file writes an arm's ``part``, a key of ``_FIELDS``; the arm's place if nowhere."""
        from ablate.study.parts import locate

        return locate(self.source, arm.parts, *_FIELDS[part]) or ("arms", arm.name)
