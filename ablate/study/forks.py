"""``fork:`` of an arm: the parent, whose state it starts from, and after how many tokens, in whole steps.

Costs count from the fork, so the baseline must have the same state there: it is the parent, or it forks from
the same parent at the same place.

How it fails: each fault is added at its place.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from ablate.base.errors import likely
from ablate.run.schedule import plan_steps
from ablate.store.plan_file import ForkPoint
from ablate.study.arms import content_of
from ablate.study.checks import Misfit
from ablate.study.layers import locate

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from ablate.study.arms import Arms
    from ablate.study.source import Source
    from ablate.study.study import ResolvedArm

_KEPT = (
    "seq_len", "batch_size", "eval_tokens", "eval_windows", "evaluate_in", "master_weights", "reduction",
    "compile",
)  # fmt: skip
"""Fields of training that belong to the state, the order of the data or what is evaluated."""


def resolve_forks(found: Arms, names: Collection[str], baseline: str) -> None:
    """Check the forks, and replace each by the parent that runs and a start in whole steps.

    ``names``: of all arms in the file, also of those with faults. A fork from itself, by inheritance, is
    removed.
    """
    written, faults, source = dict(found.arms), found.faults, found.faults.source
    folded = {cell.name: cell.into for cell in found.folded}
    forked = {name: arm.fork.arm for name, arm in written.items() if arm.fork is not None}
    parents = {name: folded.get(parent, parent) for name, parent in forked.items()}
    for name in forked:
        arm, parent, fork = written[name], written.get(parents[name]), None
        misfit = next(_misfits(arm, written, parents, names, source), None)
        if misfit is not None:
            found.add_fault(name, arm.layers, misfit)
        elif parent is not None and parent is not arm:  # from itself, by inheritance: it is no fork
            fork = ForkPoint(arm=parent.name, tokens=_whole_steps(arm))
            # ``Arms`` sees it only if the parent comes first in the file.
            if content_of(arm) == content_of(parent):
                found.refuse_same(arm, parent.name)
        found.arms[name] = replace(arm, fork=fork)
    if not forked or faults:
        return
    if source.get("tune") is not None:
        hint = "tune them in a study of their own"
        faults.add(("tune",), "a study with forks cannot tune its arms", hint)
    base = found.arms[baseline]
    for arm in found.arms.values():
        if arm is base or arm.fork == base.fork or (base.fork is not None and base.fork.arm == arm.name):
            continue
        if base.fork is not None or (arm.fork is not None and arm.fork.arm != base.name):
            what = f"the baseline '{base.name}' does not pass through the place where this arm begins"
            hint = "costs count from one place: fork both from one arm after as many tokens"
            found.add_fault(arm.name, arm.layers, Misfit(what, hint, ("fork.from", "fork")))


def _whole_steps(arm: ResolvedArm) -> int:
    assert arm.fork is not None
    per_step = plan_steps(arm.training).tokens_per_step
    return max(1, round(arm.fork.tokens / per_step)) * per_step


def _misfits(
    arm: ResolvedArm,
    written: dict[str, ResolvedArm],
    parents: dict[str, str],
    names: Collection[str],
    source: Source,
) -> Iterator[Misfit]:
    for key, meaning in (("from", "the arm that it leaves"), ("at", "after how many tokens")):
        if locate(source, arm.layers, f"fork.{key}") is None:
            yield Misfit(f"missing key '{key}'", meaning, ("fork",))
    name = parents[arm.name]
    parent = written.get(name)
    if name == arm.name:
        place = locate(source, arm.layers, "fork.from")
        if place is not None and place[:2] == ("arms", name):
            yield Misfit("an arm cannot fork from itself", None, ("fork.from",))
    elif parent is None:
        if name not in names:  # otherwise it has faults of its own
            yield Misfit(f"no arm '{name}' to fork from", likely(name, names, None), ("fork.from",))
    else:
        if (other := parents.get(name, name)) != name:
            hint = "an arm that others fork from is trained from its beginning"
            yield Misfit(f"'{name}' itself forks from '{other}'", hint, ("fork.from",))
        if arm.trainer is not None or parent.trainer is not None:
            what = "a training function of your own cannot fork"
            yield Misfit(what, "its state is not known", ("trainer", "fork"))
        pairs = [("backend", arm.backend, parent.backend)]
        for part in ("model", "data", "training"):
            own, others = vars(getattr(arm, part)), vars(getattr(parent, part))
            keys = _KEPT if part == "training" else [field.name for field in fields(getattr(arm, part))]
            pairs += [(f"{part}.{key}", own[key], others[key]) for key in keys]
        for path, mine, theirs in pairs:
            if mine != theirs:
                what = f"{path.rpartition('.')[2]} {mine} cannot go on from '{name}', which has {theirs}"
                yield Misfit(what, "a fork continues the same state and data", (path, "fork"))
        tokens = _whole_steps(arm)
        for one in (arm, parent):
            if tokens >= (budget := plan_steps(one.training).tokens):
                what = f"a fork after {tokens} tokens, but '{one.name}' trains {budget} tokens"
                yield Misfit(what, "both in whole steps; fork before the end", ("fork.at",))
