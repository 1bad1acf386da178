"""Checks between arms: forks, and arms that replay the baseline's routes.

``fork:`` starts an arm from another's state. Costs count from the fork, so the baseline must have the same
state there: it is the parent, or it forks from the same parent at the same place.

How it fails: faults are added to the collector.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from ablate.base.errors import likely
from ablate.run.schedule import plan_steps
from ablate.store.plan_file import ForkPoint
from ablate.study.arms import content_of
from ablate.study.checks import Misfit
from ablate.study.parts import locate

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from ablate.study.arms import Arms
    from ablate.study.source import Source
    from ablate.study.study import ResolvedArm

_STATE = (
    "seq_len", "batch_size", "eval_tokens", "eval_windows", "evaluate_in", "master_weights", "reduction",
    "compile",
)  # fmt: skip
"""Fields of training that belong to the state, the order of the data or what is evaluated."""


def resolve_forks(arms: Arms, names: Collection[str], baseline: str) -> None:
    """Check the forks, and replace each by the parent that runs and a start in whole steps.

    ``names``: of all arms in the file, also of those with faults. A fork from itself, by inheritance, is
    removed.
    """
    written = dict(arms.arms)
    faults = arms.faults
    forks = {}
    for name, arm in written.items():
        if arm.fork is not None:
            step = plan_steps(arm.training).tokens_per_step
            tokens = max(1, round(arm.fork.tokens / step)) * step
            parent_name = arms.folded.get(arm.fork.arm, arm.fork.arm)
            forks[name] = ForkPoint(arm=parent_name, tokens=tokens)
    for name, fork in forks.items():
        arm = written[name]
        parent = written.get(fork.arm)
        misfit = next(_misfits(arm, parent, forks, names, faults.source), None)
        if misfit is not None:
            arms.add_fault(arm.parts, misfit)
        elif parent not in (None, arm) and content_of(arm) == content_of(parent):
            # ``Arms`` sees it only if the parent comes first in the file
            arms.refuse_same(arm, fork.arm)
        is_fork = misfit is None and fork.arm != name
        arms.arms[name] = replace(arm, fork=fork if is_fork else None)
    if not forks or faults:
        return
    if faults.source.get("tune") is not None:
        hint = "tune them in a study of their own"
        faults.add(("tune",), "a study with forks cannot tune its arms", hint)
    base = arms.arms[baseline]
    for arm in arms.arms.values():
        if not _have_one_start(arm, base):
            message = f"the baseline '{base.name}' does not pass through the place where this arm begins"
            hint = "costs count from one place: fork both from one arm after as many tokens"
            misfit = Misfit(message, hint, ("fork.from", "fork"))
            arms.add_fault(arm.parts, misfit)


def _have_one_start(arm: ResolvedArm, base: ResolvedArm) -> bool:
    """Whether the arm and the baseline have the same state where the arm begins."""
    if arm is base or arm.fork == base.fork:
        return True
    if base.fork is not None:
        return base.fork.arm == arm.name
    return arm.fork is None or arm.fork.arm == base.name


def check_replays(arms: Arms, baseline: str) -> None:
    """Check the arms that replay the baseline's routes: they differ from it in the recipe alone."""
    base = arms.arms.get(baseline)
    if base is None:
        return
    is_tuned = arms.faults.source.get("tune") is not None
    for arm in arms.arms.values():
        if arm.model.routing != "replay":
            continue
        message = _replay_fault(arm, base)
        if message is None and is_tuned:
            message = "a study that tunes replays no routes"
        if message is not None:
            hint = (
                "replay takes the baseline's experts in another recipe, all else equal"
            )
            arms.add_fault(arm.parts, Misfit(message, hint, ("model.routing",)))


def _replay_fault(arm: ResolvedArm, base: ResolvedArm) -> str | None:
    if arm is base:
        return "the baseline replays nobody's routes"
    learned = replace(arm, model=replace(arm.model, routing="learned"))
    sections = ("model", "data", "training", "backend", "trainer", "fork")
    different = [
        name for name in sections if getattr(learned, name) != getattr(base, name)
    ]
    if different:
        return f"the baseline '{base.name}' has another {'/'.join(different)}"
    if arm.trainer:
        return "a trainer of your own replays no routes"
    if arm.resources.devices_per_run > 1:
        return "a run on several devices replays no routes"
    if base.resources.devices_per_run > 1:
        return "the baseline trains on several devices, without a record"
    return None


def _misfits(
    arm: ResolvedArm,
    parent: ResolvedArm | None,
    forks: dict[str, ForkPoint],
    names: Collection[str],
    source: Source,
) -> Iterator[Misfit]:
    for key, meaning in (
        ("from", "the arm that it leaves"),
        ("at", "after how many tokens"),
    ):
        if locate(source, arm.parts, f"fork.{key}") is None:
            yield Misfit(f"missing key '{key}'", meaning, ("fork",))
    fork = forks[arm.name]
    if parent is None:
        if fork.arm not in names:  # otherwise it has faults of its own
            hint = likely(fork.arm, names, None)
            yield Misfit(f"no arm '{fork.arm}' to fork from", hint, ("fork.from",))
        return
    if parent is arm:
        place = locate(source, arm.parts, "fork.from")
        if place is not None and place[:2] == ("arms", arm.name):
            yield Misfit("an arm cannot fork from itself", None, ("fork.from",))
        return
    if parent.name in forks and forks[parent.name].arm != parent.name:
        message = f"'{parent.name}' itself forks from '{forks[parent.name].arm}'"
        hint = "an arm that others fork from is trained from its beginning"
        yield Misfit(message, hint, ("fork.from",))
    if arm.trainer is not None or parent.trainer is not None:
        message = "a training function of your own cannot fork"
        yield Misfit(message, "its state is not known", ("trainer", "fork"))
    yield from _different_state(arm, parent)
    for run in (arm, parent):
        budget = plan_steps(run.training).tokens
        if fork.tokens >= budget:
            message = f"a fork after {fork.tokens} tokens, but '{run.name}' trains {budget} tokens"
            hint = "both in whole steps; fork before the end"
            yield Misfit(message, hint, ("fork.at",))


def _different_state(arm: ResolvedArm, parent: ResolvedArm) -> Iterator[Misfit]:
    """Yield the fields of an arm that differ from its parent's, though they belong to the state."""
    pairs = [("backend", arm, parent)]
    for name in ("model", "data", "training"):
        section = getattr(arm, name)
        keys = _STATE if name == "training" else [f.name for f in fields(section)]
        pairs += [(f"{name}.{key}", section, getattr(parent, name)) for key in keys]
    for path, section, other_section in pairs:
        key = path.rpartition(".")[2]
        value = getattr(section, key)
        other = getattr(other_section, key)
        if value != other:
            message = (
                f"{key} {value} cannot go on from '{parent.name}', which has {other}"
            )
            hint = "a fork continues the same state and data"
            yield Misfit(message, hint, (path, "fork"))
