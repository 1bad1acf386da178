"""Whether a change of the baseline is kept: the rule of ``ablate try``, which looks after each seed.

The change is kept at the first look at which its token cost is shown to be below the margin, and discarded
at the first at which it is shown to be above. Of changes whose true cost is the margin or more, all looks
together keep at most ``ALPHA``: each has Pocock's level for one side (``stop_rule``), so that each end of the
interval errs that often. From half of the seeds on, a change is also discarded if its estimate is above the
margin, because more seeds will hardly show it to be below. That only takes keeps away, so the bound holds.

Many tries of one baseline keep more by luck than one does. ``level_in_loop`` spends ``ALPHA`` over all of them:
the k-th gets ``ALPHA`` / k (k + 1), which sums to ``ALPHA`` however many there are. By Boole's inequality that
holds although they share the baseline's runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ablate.results.cost import token_costs
from ablate.results.intervals import ALPHA

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.results.cost import Cost, Sides
    from ablate.results.intervals import Method


@dataclass(frozen=True)
class Judgement:
    """What is known of a change by ``seeds`` runs of each side, and its token cost by these.

    ``decision``: ``keep``, ``discard``, ``undecided``, or ``open`` while one of these runs has no result; the
    cost is then that of the look before, None before the first.
    """

    decision: str
    seeds: int
    cost: Cost | None


def level_in_loop(number: int) -> float:
    """Return the level of the ``number``-th try of a baseline, from 1, for ``ALPHA`` over all its tries.

    >>> [f"{level_in_loop(number):.2%}" for number in (1, 2, 3)]
    ['2.50%', '0.83%', '0.42%']
    """
    return ALPHA / (number * (number + 1))


def judge(
    sides: Sides, looks: Sequence[int], method: Method, margin: float
) -> Judgement:
    """Judge a change by the first look that decides.

    ``sides``: runs of the change and of the baseline, in the order of the seeds. ``looks``: numbers of seeds,
    rising; the last is all. ``margin``: a token cost that would still be kept.
    """
    change, baseline = sides
    cost = None
    for seeds in looks:
        runs = (change[:seeds], baseline[:seeds])
        if any(run.end == "missing" for run in (*runs[0], *runs[1])):
            return Judgement("open", seeds, cost)
        cost = token_costs({"change": runs}, method)["change"]
        decision = _decision(cost, margin, is_half=2 * seeds >= looks[-1])
        if decision != "undecided":
            break
    return Judgement(decision, seeds, cost)


def _decision(cost: Cost, margin: float, *, is_half: bool) -> str:
    """Decide by one look. ``is_half``: half of the seeds have run."""
    low = -math.inf if cost.low is None else cost.low
    high = math.inf if cost.high is None else cost.high
    # a bound is that of these runs alone
    estimate = low if cost.estimate is None else cost.estimate
    if cost.kind == "interval" and high < margin:
        return "keep"
    if (is_half and estimate > margin) or (cost.kind == "interval" and low > margin):
        return "discard"
    return "undecided"
