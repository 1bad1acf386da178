"""The values that tuning found for a study, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ablate.store.lock import GroupTuning

if TYPE_CHECKING:
    from ablate.study.space import Tune


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """The search of a study. ``study``: the name of the trials' study in the same storage."""

    study: str
    tune: Tune
    groups: tuple[GroupTuning, ...]

    @property
    def is_done(self) -> bool:
        """Whether every group has its values."""
        return all(group.chosen is not None for group in self.groups)

    def group_of(self, arm: str) -> GroupTuning:
        """Return the group of an arm."""
        return next(group for group in self.groups if arm in group.arms)


def begin_tuning(study: str, tune: Tune) -> Tuning:
    """Return the search as it is before any trial; ``study``: the name of the study."""
    groups = tuple(
        GroupTuning(name=group.name, arms=group.arms, shared=group.shared, trials=(), chosen=None)
        for group in tune.groups
    )
    return Tuning(study=f"{study} tune", tune=tune, groups=groups)
