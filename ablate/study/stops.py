"""``stop:`` in a study: when arms end early; ``ablate.reports.statistics.stopping`` applies the rule.

How it fails: each impossible look is a fault at its own place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.store.lock import Hopeless, Settled, StopRule
from ablate.study.sections import SeedsSection
from ablate.study.tree import Mapping, Scalar, Sequence, get

if TYPE_CHECKING:
    from ablate.study.faults import Faults
    from ablate.study.sections import StudyFile
    from ablate.study.tree import Node

MOST_LOOKS = 50


def check_stop(root: Mapping, file: StudyFile | None, faults: Faults) -> None:
    """Check the looks against each other and against the seeds."""
    if file is not None and isinstance(file.seeds, SeedsSection):
        _check_seeds(get(root, "seeds"), file, file.seeds, faults)
    node = get(root, "stop")
    if file is None or file.stop is None or node is None:
        return
    if file.stop.diverged is None and file.stop.hopeless is None:
        faults.add(node, "a stop rule without a rule", "give 'diverged', 'hopeless' or both")
    seeds = len(file.every_seed)
    if file.stop.diverged is not None and file.stop.diverged >= seeds:
        what = f"with {seeds} seeds nothing is left to be stopped then"
        faults.add(get(node, "diverged") or node, what, f"at most {seeds - 1}" if seeds > 1 else "add seeds")
    if file.stop.hopeless is None:
        return
    hopeless = get(node, "hopeless") or node
    looks = get(hopeless, "looks")
    if seeds < 3:
        what = f"{seeds} {'seed gives' if seeds == 1 else 'seeds give'} no two looks, the first after 2 seeds"
        faults.add(hopeless, what, "from 3 seeds up there is something to be stopped")
        return
    if not isinstance(looks, Sequence):
        if seeds - 1 > MOST_LOOKS:
            what = f"a look after each of {seeds} seeds is too much"
            faults.add(hopeless, what, f"give looks: [...], at most {MOST_LOOKS}")
        return
    if len(looks.items) > MOST_LOOKS:
        faults.add(looks, f"{len(looks.items)} looks are too many", f"at most {MOST_LOOKS}")
    before = 1
    for item in looks.items:
        assert isinstance(item, Scalar)
        assert isinstance(item.value, int)
        if item.value > seeds:
            faults.add(item, f"a look after {item.value} seeds, of which the study has {seeds}")
        elif item.value < 2:
            faults.add(item, f"a look needs 2 seeds for an interval, got {item.value}")
        elif item.value == before:
            faults.add(item, f"a second look after {before} seeds")
        elif item.value < before:
            faults.add(item, f"a look after {item.value} seeds comes before the one after {before}")
        before = max(before, item.value)
    if [item.value for item in looks.items if isinstance(item, Scalar)] == [seeds]:
        faults.add(looks, "one look at all seeds can stop nothing", "the last look is at all seeds anyway")


def _check_seeds(node: Node | None, file: StudyFile, seeds: SeedsSection, faults: Faults) -> None:
    """Check ``seeds: {until: settled}``."""
    assert isinstance(node, Mapping)
    most, least = (node.entries.get(key, node) for key in ("at_most", "at_least"))
    if seeds.at_least < 2:
        faults.add(least, f"a look needs 2 seeds for an interval, got {seeds.at_least}")
    elif seeds.at_most <= seeds.at_least:
        what = f"at most {seeds.at_most} seeds leave nothing to stop after {seeds.at_least}"
        faults.add(most, what, f"from {seeds.at_least + 1} up")
    elif seeds.at_most - seeds.at_least >= MOST_LOOKS:
        faults.add(most, f"a look after each of {seeds.at_most} seeds is too much", f"at most {MOST_LOOKS}")
    if file.stop is not None and file.stop.hopeless is not None:
        what = "a second rule that looks at the results: stop.hopeless"
        faults.add(node, what, "leave one out; an arm that is shown to cost tokens is settled, too")


def stop_rule(file: StudyFile) -> StopRule | None:
    """Return the rule with every look, None if the study has no rule."""
    settled = None
    if isinstance(file.seeds, SeedsSection):
        looks = tuple(range(file.seeds.at_least, file.seeds.at_most + 1))
        settled = Settled(looks=looks, narrower_than=file.seeds.narrower_than)
    if file.stop is None:
        return None if settled is None else StopRule(settled=settled)
    hopeless = None
    if (said := file.stop.hopeless) is not None:
        seeds = len(file.every_seed)
        chosen = range(2, seeds + 1) if said.looks is None else said.looks
        every = tuple(sorted({*chosen, seeds}))  # the last look is always at all seeds
        hopeless = Hopeless(cost_above=said.cost_above, spending=said.spending, looks=every)
    return StopRule(diverged=file.stop.diverged, hopeless=hopeless, settled=settled)
