"""``stop:`` and ``seeds: {until: settled}`` in a study: when arms end early.

``ablate.results.stop_rule`` applies the rules.

How it fails: each number that leaves nothing to stop, or too much to look at, is a fault at its own place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.store.plan_file import Settled, StopRule
from ablate.study.sections import SeedsSection
from ablate.study.tree import get

if TYPE_CHECKING:
    from ablate.study.messages import Faults
    from ablate.study.sections import StudyFile
    from ablate.study.tree import Mapping

MOST_LOOKS = 50


def check_stop(root: Mapping, file: StudyFile | None, faults: Faults) -> None:
    """Check the rules against the seeds."""
    if file is None:
        return
    if isinstance(rule := file.seeds, SeedsSection):
        node = get(root, "seeds") or root
        most, least = (get(node, key) or node for key in ("at_most", "at_least"))
        if rule.at_least < 2:
            faults.add(least, f"a look needs 2 seeds for an interval, got {rule.at_least}")
        elif rule.at_most <= rule.at_least:
            what = f"at most {rule.at_most} seeds leave nothing to stop after {rule.at_least}"
            faults.add(most, what, f"from {rule.at_least + 1} up")
        elif rule.at_most - rule.at_least >= MOST_LOOKS:
            what = f"a look after each of {rule.at_most} seeds is too much"
            faults.add(most, what, f"at most {MOST_LOOKS}")
    if file.stop is None:
        return
    node, seeds = get(root, "stop") or root, len(file.every_seed)
    if file.stop.diverged is None:
        faults.add(node, "a stop rule without a rule", "give 'diverged'")
    elif file.stop.diverged >= seeds:
        what = f"with {seeds} seeds nothing is left to be stopped then"
        faults.add(get(node, "diverged") or node, what, f"at most {seeds - 1}" if seeds > 1 else "add seeds")


def stop_rule(file: StudyFile) -> StopRule | None:
    """Return the rule with every look, None if the study has no rule."""
    settled, seeds = None, file.seeds
    if isinstance(seeds, SeedsSection):
        looks = tuple(range(seeds.at_least, seeds.at_most + 1))
        settled = Settled(looks=looks, narrower_than=seeds.narrower_than)
    diverged = None if file.stop is None else file.stop.diverged
    return StopRule(diverged=diverged, settled=settled) if diverged or settled else None
