"""``try_change``: what ``ablate try`` does between its options and its last lines.

A try is a study of its own, ``STUDY try N``: the study's file with two arms, the baseline and the baseline with
the change. So the study's plan and report stay as they are. N counts the tries; the same change of the same
baseline finds its number again, and with it its runs. Results of the baseline are taken from the study and from
earlier tries. The seeds run one after the other until ``change_rule`` decides.

How it fails: as ``run_study`` does. A failed run leaves the try open, and the same call runs it again.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from ablate.execute.environment import code_of
from ablate.plan import build_plan
from ablate.results.change_rule import judge, level_in_loop
from ablate.results.frames import load_frames
from ablate.results.intervals import ALPHA
from ablate.results.stop_rule import level_of_looks, method_of
from ablate.results.stops import decisions
from ablate.store import StudyStore
from ablate.study import load_study
from ablate.workflow.run import load_known, run_study

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ablate.results.change_rule import Judgement
    from ablate.store.plan_file import LockedPlan
    from ablate.study import Study
    from ablate.workflow import Listener, StudyEnd, Where


def try_change(
    study: str,
    change: Sequence[str],
    where: Where,
    listener: Listener,
    *,
    margin: str | None,
    seeds: int | None,
    in_loop: bool,
) -> tuple[Judgement, int, StudyEnd]:
    """Train baseline and change seed by seed, until the change is kept or discarded or the seeds are used up.

    ``change``: keys of the changed arm, ``KEY=VALUE`` each. ``margin``: a token cost that would still be kept.
    ``seeds``: at most; None: as many as the study's. ``in_loop``: hold the level over all tries of this
    baseline, among which the number that is returned counts.

    Raises:
        UserError: the study has no target, or its baseline cannot be changed so; or as ``run_study``.
    """
    loaded = load_known(study, where, ())
    arm = f"with {' '.join(change)}".replace("=", " ").replace('"', "")[:80].strip()
    num_seeds = seeds or len(loaded.seeds)
    settings = _settings(loaded, arm, change, margin, num_seeds)
    tried = load_study(loaded.path, tuple(settings))
    plan = build_plan(tried, machines=where.machines)
    store, number = _numbered(plan, where.storage)
    level = level_in_loop(number) if in_loop else ALPHA
    judgement = partial(_judgement, store, arm, level)
    end = run_study(
        loaded.path,
        where,
        listener,
        only=(plan.baseline, arm),
        retry_failed=True,
        settings=(f"name={store.path.name}", *settings),
        seeds_allowed=lambda: judgement().seeds,
    )
    return judgement(), number, end


def _judgement(store: StudyStore, arm: str, level: float) -> Judgement:
    """Judge the changed arm by the runs that have ended."""
    frames = load_frames(store)
    plan = frames.plan
    assert plan.settled is not None
    looks = plan.settled.looks
    alpha = level_of_looks(looks, level, one_sided=True)
    method = replace(method_of(plan), alpha=alpha)
    margin = 0.0 if plan.margin is None else plan.margin.value
    ((_, runs),) = decisions(frames)
    return judge((runs[arm], runs[plan.baseline]), looks, method, margin)


def _numbered(plan: LockedPlan, storage: Path) -> tuple[StudyStore, int]:
    """Return the store of a try, and its number among the tries of its baseline."""
    run_ids = [run.id for _, run in plan.runs()]
    of_baseline = 1
    for number in count(1):
        store = StudyStore(storage / f"{plan.study} try {number}")
        if not store.plan_path.exists():
            break
        earlier = store.plan()
        earlier_ids = [run.id for _, run in earlier.runs()]
        if (earlier.settings[1:], earlier_ids) == (plan.settings, run_ids):
            break
        # the baseline's first run
        of_baseline += earlier_ids[0] == run_ids[0]
    return store, of_baseline


def _settings(
    study: Study, arm: str, change: Sequence[str], margin: str | None, seeds: int
) -> list[str]:
    """Return what turns the study's file into that of a try."""
    baseline = next(arm for arm in study.arms if arm.name == study.baseline)
    code = ""
    # of other code it is another try, unless the study names the files that count
    if not getattr(baseline.trainer, "files", None):
        code = f" with code {code_of(baseline.trainer)}"
    values = {
        "description": f"A try of {study.name}{code}",
        "grid": None,
        "tune": None,
        "arms": {study.baseline: {}, arm: {"from": study.baseline}},
        "waive": [*study.waive, "code"],
        "seeds": {"until": "settled", "at_most": seeds},
    }
    if study.source.get("target", "within") is not None:
        values["target.within"] = None
    for key, value in baseline.factors.items():
        values[f"arms.{study.baseline}.{key}"] = value
    settings = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    if margin is not None:
        settings.append(f"target.within.cost={margin}")
    settings += [f"arms.{arm}.{setting}" for setting in change]
    return [*study.settings, *settings]
