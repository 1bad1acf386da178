"""``fork:`` of an arm: which arm it leaves, and after how many tokens, in whole steps.

A cost counts from the fork, so the baseline must have the same state there: it is the arm that is left, or
leaves the same arm at the same place.

How it fails: each fault is added at its place.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ablate.run.schedule import plan_steps
from ablate.store.plan_file import ForkPoint
from ablate.study.messages import did_you_mean, got_text
from ablate.study.tree import get

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from ablate.study.build_arms import ArmCollector
    from ablate.study.merge import Draft
    from ablate.study.messages import Faults
    from ablate.study.study import ResolvedArm
    from ablate.study.tree import Mapping as Tree
    from ablate.study.tree import Node

_KEPT = (
    "seq_len", "batch_size", "eval_tokens", "eval_windows", "evaluate_in", "master_weights", "reduction",
    "compile",
)  # fmt: skip
"""Fields of training that belong to the state, the order of the data or what is evaluated."""


def resolve_forks(
    root: Tree,
    collector: ArmCollector,
    drafts: Sequence[Draft],
    names: Collection[str],
    baseline: str,
    faults: Faults,
) -> None:
    """Check the forks, and put the arm that is left and whole steps in place of what was written.

    ``names``: of all arms that the file has, also of those with faults.
    """
    folded = {cell.name: cell.into for cell in collector.folded}
    forks = _Forks(arms=dict(collector.arms), folded=folded, names=names, faults=faults)
    forked = [draft for draft in drafts if draft.name in forks.arms and forks.arms[draft.name].fork]
    for draft in forked:
        arm = collector.arms[draft.name]
        fork = forks.resolved(arm, draft)
        # The collector sees it only where the arm that is left stands before this one.
        if fork is not None and collector.content(arm) == collector.content(forks.arms[fork.arm]):
            collector.refuse_same(draft, fork.arm)
        collector.arms[arm.name] = replace(arm, fork=fork)
    if not forked or faults:
        return
    if (tune := root.entries.get("tune")) is not None:
        faults.add(tune, "a study with forks cannot tune its arms", "tune them in a study of their own")
    base = collector.arms[baseline]
    for draft in drafts:
        if draft.name in collector.arms and draft.name != baseline:
            forks.compare(collector.arms[draft.name], base, draft)


@dataclass(frozen=True, kw_only=True)
class _Forks:
    """The arms as written, by name; ``folded``: a cell's name → the arm that it is."""

    arms: Mapping[str, ResolvedArm]
    folded: Mapping[str, str]
    names: Collection[str]
    faults: Faults

    def _add(self, draft: Draft, node: Node, what: str, hint: str | None = None) -> None:
        arm = None if node.path[:2] == ("arms", draft.name) else draft.name
        self.faults.add(node, what, hint, arm=arm)

    def _parent(self, arm: ResolvedArm) -> str | None:
        """Return the name of the arm that an arm leaves; None if it is itself, by inheritance."""
        if arm.fork is None:
            return None
        name = self.folded.get(arm.fork.arm, arm.fork.arm)
        return None if name == arm.name else name

    def resolved(self, arm: ResolvedArm, draft: Draft) -> ForkPoint | None:
        """Return an arm's fork in whole steps; None where there is none, or a fault."""
        whole, source, at = (
            draft.node_to_report(*paths) for paths in (("fork",), ("fork.from",), ("fork.at",))
        )
        for key, meaning in (("from", "the arm that it leaves"), ("at", "after how many tokens")):
            if get(draft.sections["fork"], key) is None:
                self._add(draft, whole, f"missing key '{key}'", meaning)
                return None
        assert arm.fork is not None
        name = self._parent(arm)
        if name is None:
            if source.path[:2] == ("arms", arm.name):
                self._add(draft, source, "an arm cannot fork from itself")
            return None
        parent = self.arms.get(name)
        if parent is None:
            if name not in self.names:
                hint = did_you_mean(name, self.names)
                self._add(draft, source, f"no arm {got_text(source)} to fork from", hint)
            return None
        if (other := self._parent(parent)) is not None:
            hint = "an arm that others fork from is trained from its beginning"
            self._add(draft, source, f"'{name}' itself forks from '{other}'", hint)
            return None
        if arm.trainer is not None or parent.trainer is not None:
            node = draft.node_to_report("trainer", "fork")
            self._add(draft, node, "a training function of your own cannot fork", "its state is not known")
            return None
        for path, own, others in _differences(arm, parent):
            what = f"{path.rpartition('.')[2]} {own} cannot go on from '{name}', which has {others}"
            self._add(
                draft, draft.node_to_report(path, "fork"), what, "a fork continues the same state and data"
            )
            return None
        per_step = plan_steps(arm.training).tokens_per_step
        tokens = max(1, round(arm.fork.tokens / per_step)) * per_step
        for one in (arm, parent):
            if tokens >= (budget := plan_steps(one.training).tokens):
                what = f"a fork after {tokens} tokens, but '{one.name}' trains {budget} tokens"
                self._add(draft, at, what, "both in whole steps; fork before the end")
                return None
        return ForkPoint(arm=name, tokens=tokens)

    def compare(self, arm: ResolvedArm, base: ResolvedArm, draft: Draft) -> None:
        """Refuse an arm that has no state in common with the baseline where its cost would count from."""
        if arm.fork == base.fork:
            return
        if base.fork is not None and base.fork.arm != arm.name:
            place = f"from '{base.fork.arm}' after {base.fork.tokens} tokens"
            what = f"the baseline forks {place}, this arm does not"
            self._add(
                draft, draft.node_to_report("fork"), what, "costs count from one place: fork it there, too"
            )
        elif arm.fork is not None and arm.fork.arm != base.name:
            what = f"the baseline '{base.name}' does not pass through this fork of '{arm.fork.arm}'"
            self._add(draft, draft.node_to_report("fork.from"), what, f"fork from '{base.name}'")


def _differences(arm: ResolvedArm, parent: ResolvedArm) -> Iterator[tuple[str, Any, Any]]:
    """Yield the fields, with both values, in which an arm cannot go on where its parent is."""
    for name in ("model", "data", "training"):
        own, other = getattr(arm, name), getattr(parent, name)
        for key in _KEPT if name == "training" else [field.name for field in fields(own)]:
            if getattr(own, key) != getattr(other, key):
                yield f"{name}.{key}", getattr(own, key), getattr(other, key)
    if arm.backend != parent.backend:
        yield "backend", arm.backend, parent.backend
