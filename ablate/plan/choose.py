"""Selection of a study's runs by arms and seeds."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from ablate.base.errors import UserError
from ablate.study.space import tuned_name

if TYPE_CHECKING:
    from collections.abc import Collection

    from ablate.plan.plan import Plan


def choose_runs(plan: Plan, only: Collection[str] = (), seeds: Collection[int] | None = None) -> set[str]:
    """Return the ids of the runs of these arms (empty: all arms) and seeds (None: all seeds).

    Raises:
        UserError: the study lacks an arm or a seed; the message names the command line's option.
    """
    names = {arm.name for arm in plan.arms}
    if plan.tuning is not None:  # an arm whose best values are the study's own is its own tuned arm
        stands_for = {tuned_name(name): name for name in names if tuned_name(name) not in names}
        only = tuple(stands_for.get(name, name) for name in only)
    for name in only:
        if name not in names:
            likely = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean '{likely[0]}'?" if likely else f"arms: {', '.join(sorted(names))}"
            raise UserError(f"--only: no arm '{name}' in study '{plan.study}' ({hint})")
    known = {run.seed for _, run in plan.runs()}
    if seeds is not None and (unknown := sorted(set(seeds) - known)):
        there = ", ".join(map(str, sorted(known)))
        raise UserError(f"--seeds: {unknown[0]} is not a seed of study '{plan.study}' (seeds: {there})")
    return {
        run.id
        for arm, run in plan.runs()
        if (not only or arm.name in only) and (seeds is None or run.seed in seeds)
    }
