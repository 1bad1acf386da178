"""A study after validation: every arm resolved, independent of the file's notation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate.store.plan_file import Question

if TYPE_CHECKING:
    from ablate.recipes import Recipe, RecipeSpec
    from ablate.run.config import (
        BackendName,
        DataConfig,
        ModelConfig,
        ResourcesConfig,
        TrainingConfig,
    )
    from ablate.run.diagnostics import Diagnostics
    from ablate.store.plan_file import ForkPoint
    from ablate.study.search_section import Search
    from ablate.study.search_space import Tune


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedArm:
    """One arm. ``factors`` maps the paths that the arm or the grid set to their values, as written.

    ``lines``: (line, column) of the model, trainer and recipe, and of the settings that arms must share, for
    faults that only planning can find.
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
    trainer: str | None
    resources: ResourcesConfig
    fork: ForkPoint | None
    lines: dict[str, tuple[int, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldedCell:
    """A cell of the grid with the same configuration as the arm ``into``, and so without its own runs."""

    name: str
    into: str

    @property
    def reason(self) -> str:
        """Why it has no runs of its own."""
        return f"the same configuration as '{self.into}'"


def again_name(baseline: str) -> str:
    """Return the name of the arm that ``baseline_again`` adds."""
    return f"{baseline} again"


@dataclass(frozen=True, kw_only=True)
class Study(Question):
    """A validated study. ``training`` is the base's section, which most arms share.

    ``target_line``, ``layer_lines``, ``what_if_lines``: (line, column) of the target's value, of the
    diagnosed layers' patterns and of the recipes of ``what_if``, for faults that only planning can find.
    """

    name: str
    target_line: tuple[int, int]
    seeds: tuple[int, ...]
    baseline_again: bool
    training: TrainingConfig
    arms: tuple[ResolvedArm, ...]
    folded: tuple[FoldedCell, ...]
    diagnostics: Diagnostics | None
    layer_lines: tuple[tuple[int, int], ...]
    what_if_lines: tuple[tuple[int, int], ...]
    path: Path
    keep_weights: bool = False
    tune: Tune | None = None
    search: Search | None = None

    @property
    def shown_path(self) -> str:
        """The file as a fault names it: from the current folder, where it lies below it."""
        here = Path.cwd()
        return str(self.path.relative_to(here) if self.path.is_relative_to(here) else self.path)
