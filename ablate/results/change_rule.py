"""Whether a change of the baseline is kept: the rule of ``ablate try``, which looks after each seed.

The change is kept at the first look at which its token cost is shown to be below the margin, and discarded
at the first at which it is shown to be above. All looks together keep a change whose true cost is the margin
or more in at most ``ALPHA`` of all tries: their one-sided level is Pocock's (``stop_rule``), and the interval
is a repeated one, each end of which errs that often. From half of the seeds on a change whose estimate is
above the margin is discarded as well, because more seeds will hardly show it to be below. That only takes
keeps away, so the bound on wrong ones holds (non-binding futility).

Many tries against one baseline keep more by luck than one does. ``level_in_loop`` spends ``ALPHA`` over all of
them: the k-th gets ``ALPHA`` / k (k + 1), which sums to ``ALPHA`` however many there are. By Boole's inequality
that holds although all share the baseline's runs; in the same way the looks of such a try share its level.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ablate.results.cost import token_costs
from ablate.results.intervals import ALPHA
from ablate.results.stop_rule import level_of_looks

if TYPE_CHECKING:
    from ablate.results.cost import Cost
    from ablate.results.intervals import Method
    from ablate.results.losses import Sides

    Looks = tuple[int, ...]
    """Numbers of seeds, rising; the last is all seeds."""
    Decision = Literal["keep", "discard", "undecided", "open"]


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What is known of a change after ``seeds`` runs of each side, and its token cost by these.

    ``decision``: ``open`` while one of these runs has no result; ``reason``: in words. ``cost`` is None
    before the first look.
    """

    decision: Decision
    reason: str
    seeds: int
    cost: Cost | None


def level_in_loop(number: int) -> float:
    """Return the level of a try, the ``number``-th from 1, for at most ``ALPHA`` over all tries.

    >>> [f"{level_in_loop(number):.2%}" for number in (1, 2, 3)]
    ['2.50%', '0.83%', '0.42%']
    """
    return ALPHA / (number * (number + 1))


def alpha_of(looks: Looks, level: float = ALPHA) -> float:
    """Return the two-sided level of the interval at each look, so that each end errs in ``level`` of all tries."""
    if level == ALPHA:
        return level_of_looks(looks, one_sided=True)
    return 2 * level / len(looks)


def judge(sides: Sides, looks: Looks, method: Method, margin: float) -> Judgement:
    """Judge a change by the first look that decides; ``margin``: a token cost that would still be kept.

    ``sides``: runs of the change and of the baseline, in the order of the seeds.
    """
    change, baseline = sides
    cost = None
    for seeds in looks:
        runs = (change[:seeds], baseline[:seeds])
        if any(run.end == "missing" for side in runs for run in side):
            decision: Decision = "open"
            reason = "not all runs have ended"
            break
        cost = token_costs({"change": runs}, method)["change"]
        decision, reason = _decision(cost, margin, is_half=2 * seeds >= looks[-1])
        if decision != "undecided":
            break
    return Judgement(decision=decision, reason=reason, seeds=seeds, cost=cost)


def _decision(cost: Cost, margin: float, *, is_half: bool) -> tuple[Decision, str]:
    """Return the decision of one look, and why. ``is_half``: half of the seeds have run."""
    if cost.kind == "interval" and cost.high is not None and cost.high < margin:
        return "keep", "shown to be better"
    shown = cost if cost.kind == "interval" else cost.restricted
    if shown is not None and shown.low is not None and shown.low > margin:
        return "discard", "shown to be worse"
    # without an estimate, the lower bound of these runs' own cost
    estimate = cost.low if cost.estimate is None else cost.estimate
    if is_half and estimate is not None and estimate > margin:
        return "discard", "it looks worse after half of the seeds"
    return "undecided", "all seeds are used up"
