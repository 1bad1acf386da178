"""``plan.lock.json``: a study's arms, runs and search, for everything that reads its run store.

A ``Plan`` is a ``LockedPlan`` with what only planning and running need. Unknown keys are allowed, except in a
stop rule, so that files of later versions can be read. ``ablate.store`` shows the file.

How it fails: content that does not fit is a ``ValueError`` of one line that names the place.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from ablate.base.command_hints import command_line, set_words
from ablate.base.errors import UserError
from ablate.run.loss_units import UNIT_NAMES, LossUnit, short_name
from ablate.store.records import (
    PLAIN,
    Count,
    Flag,
    Number,
    Seed,
    Text,
    Tokens,
    Training,
    Whole,
    checked,
    stored,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FORMAT: Literal[1] = 1
_ASKED = ("baseline", "target", "paired_seeds", "intervals", "waive", "stop")


@stored
class Margin:
    """How far an arm may be from the baseline and still count as equal.

    ``cost``: in token cost, a fraction; ``loss``: in final loss, in the unit of the study's losses.
    """

    kind: Literal["cost", "loss"]
    value: Annotated[Number, Field(gt=0)]


@stored
class Target:
    """The validation loss at which arms are compared, as itself or as a perplexity."""

    kind: Literal["val_loss", "perplexity"]
    value: Number
    crossing: Literal["confirmed", "first_eval"] = "confirmed"
    within: Margin | None = None

    @property
    def val_loss(self) -> float:
        """The target in the unit of the study's losses."""
        if self.kind == "perplexity":
            return math.log(self.value)
        return self.value

    def check_unit(self, unit: LossUnit) -> None:
        """Raise ``UserError`` for a perplexity if losses in this unit are not its logarithm."""
        if self.kind == "perplexity" and unit != "nats":
            raise UserError(
                "--target: a perplexity is exp(loss), with the loss in nats per token; these losses are in "
                f"{UNIT_NAMES[unit]}",
                hint="write --target val_loss=NUMBER",
            )


def _rise(looks: tuple[int, ...]) -> tuple[int, ...]:
    if any(later <= earlier for earlier, later in itertools.pairwise(looks)):
        raise ValueError("looks must rise")
    return looks


Looks = Annotated[
    tuple[Annotated[Whole, Field(ge=2, lt=1 << 31)], ...],
    Field(min_length=2, max_length=50),
    AfterValidator(_rise),
]
"""The numbers of seeds after which to check, rising; the last is all seeds."""


@stored
class Settled:
    """Stop an arm once it is settled: shown to be inside or outside of the target's margin.

    Without a margin, an arm is settled once its token cost is shown to differ from zero. ``narrower_than``:
    an interval narrower than this (a fraction of the baseline's tokens) settles the arm, too.
    """

    looks: Looks
    narrower_than: Annotated[Number, Field(gt=0)] | None = None


@dataclass(frozen=True, kw_only=True, config=ConfigDict(**PLAIN, extra="forbid"))
class StopRule:
    """When an arm's other runs are not needed. ``diverged``: after this many of its runs have diverged.

    An unknown key is refused, because the intervals would be wrong without its rule.
    """

    diverged: Count | None = None
    settled: Settled | None = None


@stored
class LockedRun:
    """One arm with one seed."""

    id: Text
    seed: Seed


@stored
class ForkPoint:
    """The arm that a fork starts from, and after how many of its tokens, in whole steps."""

    arm: Text
    tokens: Tokens


@stored
class LockedArm:
    """One arm. ``recipe``: a short description. ``tokens``: training tokens of a run, in whole steps.

    ``differs`` maps a field to the baseline's value and this arm's. ``folded``: cells of the grid with the
    same configuration. ``again``: the arm repeats the baseline with other seeds. ``fork``: None for an arm
    that does not fork from another.
    """

    name: Text
    description: Text | None = None
    again: Flag = False
    recipe: Text | None = None
    tokens: Tokens | None = None
    factors: dict[str, Any] = field(default_factory=dict)
    differs: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    folded: tuple[Text, ...] = ()
    fork: ForkPoint | None = None
    runs: tuple[LockedRun, ...]

    def differs_at(
        self, baseline_values: Mapping[str, Any], values: Mapping[str, Any]
    ) -> dict[str, tuple[Any, Any]]:
        """Return ``differs`` with these values of training."""
        differs = {
            key: pair
            for key, pair in self.differs.items()
            if key.removeprefix("training.") not in values
        }
        for key, value in values.items():
            if value != baseline_values[key]:
                differs[f"training.{key}"] = (baseline_values[key], value)
        return differs


@stored
class DroppedCell:
    """A cell of the grid that is not run."""

    name: Text
    reason: Text


@stored
class TrialRecord:
    """One trial. ``loss``: None if it was stopped early; ``tokens``: trained in all its runs.

    ``diverged``: the number of diverged runs; each counts with the loss at which a run is called diverged.
    """

    number: Annotated[Whole, Field(ge=0)]
    values: dict[str, Any]
    state: Literal["complete", "pruned"]
    loss: Number | None
    diverged: Annotated[Whole, Field(ge=0)]
    tokens: Tokens
    runs: tuple[Text, ...]


@stored
class GroupTuning:
    """Arms that are searched together. ``shared``: the study's own values; ``chosen``: None before the end.

    ``fingerprint``: searches with the same one may reuse each other's results.
    """

    name: Text
    fingerprint: Text = ""
    arms: tuple[Text, ...]
    shared: dict[str, Any]
    trials: tuple[TrialRecord, ...]
    chosen: dict[str, Any] | None


@stored
class LockedTuning:
    """The search before the seeds. ``study``: the trials' study; ``tokens``: the budget of a trial's run.

    ``fields``: the values that may be tried for each field of training. ``tuned`` maps an arm to the arm that
    runs at its best values, once the search is done.
    """

    study: Text
    done: Flag
    fields: dict[str, Any]
    sampler: Text
    trials: Count
    at_once: Count = 1
    prune: Flag = False
    tokens: Annotated[Tokens, Field(ge=1)]
    seeds: tuple[Seed, ...]
    groups: tuple[GroupTuning, ...]
    tuned: dict[str, Text]

    def group_of(self, arm: str, baseline: str) -> GroupTuning:
        """Find the group of an arm; the baseline's second arm belongs to the baseline's."""
        groups = {name: group for group in self.groups for name in group.arms}
        return groups.get(arm, groups[baseline])


@stored
class Question:
    """What a study asks of its runs.

    ``target``: None where final losses are compared. ``paired_seeds``: equal seeds are pairs. ``intervals``:
    whether an arm's variance is moderated by those of the other arms. ``waive``: settings in which runs may
    differ. ``dropped``: cells of the grid that are not run. ``settings``: what ``--set`` changed in the file.
    """

    description: Text | None = None
    baseline: Text
    target: Target | None
    paired_seeds: Flag = False
    intervals: Literal["moderated", "own"] = "moderated"
    waive: tuple[Text, ...] = ()
    stop: StopRule | None = None
    dropped: tuple[DroppedCell, ...] = ()
    settings: tuple[Text, ...] = ()

    @property
    def settled(self) -> Settled | None:
        """When an arm counts as settled; None: its seeds are not cut short so."""
        return None if self.stop is None else self.stop.settled

    def differs_from(self, other: Question) -> list[str]:
        """List the keys by which the other question asks something else of the same runs."""
        return [name for name in _ASKED if getattr(self, name) != getattr(other, name)]


@stored
class LockedPlan(Question):
    """The content of a study's plan.

    ``training``: the base's section, which most arms share. ``tuning``: None for a study without tuning.
    ``imported``: the study was built from the logs of others. ``loss_unit``: of its validation losses; a
    trainer may log its training losses in another one.
    """

    format: Literal[1] = FORMAT
    study: Text
    training: Training = field(default_factory=dict)
    arms: Annotated[tuple[LockedArm, ...], Field(min_length=1)]
    tuning: LockedTuning | None = None
    imported: Flag = False
    loss_unit: LossUnit = "nats"

    @property
    def unit(self) -> str:
        """The unit of its validation losses, as axes have it: ``nats/token``."""
        return short_name(self.loss_unit)

    @property
    def start(self) -> str:
        """The command that runs the study, with ``STUDY.yaml`` for its file."""
        return command_line("run", "STUDY.yaml", *set_words(self.settings))

    @property
    def margin(self) -> Margin | None:
        """The target's margin; None without one or without a target."""
        return None if self.target is None else self.target.within

    @property
    def is_moderated(self) -> bool:
        """Whether an arm's variance is moderated by those of the other arms."""
        return self.intervals == "moderated"

    def arm(self, name: str) -> LockedArm:
        """Find an arm by name; raises ``KeyError``."""
        return {arm.name: arm for arm in self.arms}[name]

    def counted_from(self, name: str) -> int:
        """Return the number of tokens after which an arm's cost is counted: 0 for whole runs.

        It is the arm's own fork, or the baseline's where the baseline forks from this arm.
        """
        fork = self.arm(name).fork
        if fork is not None:
            return fork.tokens
        fork = self.arm(self.baseline).fork
        if fork is not None and fork.arm == name:
            return fork.tokens
        return 0

    def runs(self) -> Iterator[tuple[LockedArm, LockedRun]]:
        """Yield every run with its arm."""
        return ((arm, run) for arm in self.arms for run in arm.runs)


_PLAN = TypeAdapter(LockedPlan)
_RARE = ("tuning", "imported", "settings")
"""Keys that are written only when they are set."""


def plan_to_json(plan: LockedPlan) -> dict[str, Any]:
    """Convert a plan to the content of its file; equal plans give equal bytes."""
    content: dict[str, Any] = _PLAN.dump_python(plan, mode="json")
    for arm in content["arms"]:
        if arm["fork"] is None:
            del arm["fork"]
    if plan.loss_unit == "nats":
        del content["loss_unit"]
    return {key: value for key, value in content.items() if value or key not in _RARE}


def plan_from_json(content: object) -> LockedPlan:
    """Read a plan from the content of its file.

    Raises:
        ValueError: the content does not fit; one line that names the place.
    """
    if isinstance(content, dict) and (version := content.get("format")) != FORMAT:
        raise ValueError(f"format {version} (expected format {FORMAT})")
    plan = checked(LockedPlan, content)
    if plan.baseline not in [arm.name for arm in plan.arms]:
        raise ValueError(f"no arm is the baseline '{plan.baseline}'")
    return plan
