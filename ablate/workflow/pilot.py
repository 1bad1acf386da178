"""``pilot_study``: what ``ablate pilot`` does: two runs of the baseline, and what they say of the study.

The runs are the study's own, so ``run_study`` afterwards trains only what is missing.

How it fails: as ``run_study`` does; without two results there is no advice.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from ablate.base.errors import UserError
from ablate.base.files import write_bytes_atomic
from ablate.plan import build_plan, estimate, known_plan, read_progress
from ablate.store import END_STATES, StudyStore
from ablate.study import load_study
from ablate.workflow import Listener
from ablate.workflow.run import run_study

if TYPE_CHECKING:
    from pathlib import Path

    from ablate.plan import Plan, StudyProgress
    from ablate.plan.pilot import Advice, PilotRun, Reached
    from ablate.store.records import SpeedRecord
    from ablate.study import Study
    from ablate.workflow import StudyEnd, Where

_SEEDS = 2
_STEPS = 2
_WARMUP_STEPS = 1
_TURNS = 2
_LONGEST_SEC = 60.0


def pilot_study(
    study: str | Path,
    where: Where,
    listener: Listener | None = None,
    *,
    write: bool = False,
    retry_failed: bool = False,
) -> tuple[StudyEnd, Advice | None]:
    """Train the baseline of a study with its first two seeds, and say what they mean for the whole.

    ``write``: put the target into the file, in place of ``target: null``. The advice is None if a run has no
    result.

    Raises:
        UserError: as ``run_study``; a study of one seed; no ``target: null`` in the file to replace.
    """
    from ablate.plan.pilot import advise

    listener = listener or Listener()
    loaded = load_study(study)
    if write and loaded.target is not None:
        raise UserError(
            f"--write: {study} has a target already (leave out --write, and change it by hand)"
        )
    plan = build_plan(loaded, machines=where.machines)
    planned_runs = plan.arm(plan.baseline).runs[:_SEEDS]
    if len(planned_runs) < _SEEDS:
        raise UserError(
            f"{study}: a pilot needs two seeds, and the study has one (set seeds: 2 or more)"
        )
    end = run_study(
        study,
        where,
        listener,
        only=[plan.baseline],
        seeds=[run.seed for run in planned_runs],
        retry_failed=retry_failed,
        seeds_allowed=lambda: _SEEDS,
    )
    if not end.is_done:
        return end, None
    store = StudyStore(where.storage / plan.study)
    plan = known_plan(plan, store)
    progress = read_progress(plan, store)
    emulated = False
    if where.address is None:
        progress, timed = with_timed_steps(plan, progress, listener)
        modes = [] if timed is None else [arm.backend_mode for arm in timed.arms]
        emulated = "emulated" in modes
    advice = advise(
        plan,
        _pilot_runs(plan, store),
        progress,
        cores=os.cpu_count() or 1,
        emulated=emulated,
    )
    if write and advice.take is not None:
        _write_target(loaded, advice.take, plan.unit)
    return end, advice


def _pilot_runs(plan: Plan, store: StudyStore) -> list[PilotRun]:
    from ablate.plan.pilot import PilotRun
    from ablate.search.engine import losses_of

    runs = []
    for planned in plan.arm(plan.baseline).runs[:_SEEDS]:
        run = store.run(planned.id)
        losses = losses_of(run)
        pilot_run = PilotRun(
            seed=planned.seed,
            tokens=list(losses),
            val_loss=list(losses.values()),
            diverged=run.state() == "diverged",
        )
        runs.append(pilot_run)
    return runs


def _write_target(study: Study, target: Reached, unit: str) -> None:
    """Put the target into the study's file, in place of ``target: null``."""
    from ablate.plan.pilot import with_target

    line = study.source.place(("target",)).line
    written = study.path.read_text(encoding="utf-8")
    text = with_target(written, line, target, unit)
    if text is None:
        raise UserError(
            f"--write: {study.path}:{line}: no line that says 'target: null' (write it by hand)"
        )
    write_bytes_atomic(study.path, text.encode())


def with_timed_steps(
    plan: Plan, progress: StudyProgress, listener: Listener
) -> tuple[StudyProgress, SpeedRecord | None]:
    """Add the speeds of arms that have no finished run, as ``arm_speeds`` times them here, if runs are left.

    Raises:
        UserError: an arm cannot run on this device.
    """
    if all(progress.state(run.id) in END_STATES for _, run in plan.runs()):
        return progress, None
    base = plan.arm(plan.baseline)
    seconds = estimate(plan, progress, cores=1).run_seconds.get(base.name, math.inf)
    timed = arm_speeds(plan, listener, seconds_per_step=seconds / base.batches.steps)
    if timed is None:
        return progress, None
    timed_speeds = {arm.arm: arm.median for arm in timed.arms}
    # The baseline's own runs tell its real speed; the timing only tells how the others compare with it.
    real_speed = progress.tokens_per_sec.get(base.name, timed_speeds[base.name])
    factor = real_speed / timed_speeds[base.name]
    speeds = {name: speed * factor for name, speed in timed_speeds.items()}
    return replace(progress, tokens_per_sec=speeds | progress.tokens_per_sec), timed


def arm_speeds(
    plan: Plan, listener: Listener, *, seconds_per_step: float
) -> SpeedRecord | None:
    """Time two steps of each arm (A B B A); return speeds without evaluation.

    This is for plans only, which need a rough idea of how much slower emulation is. None if the arms cannot
    be timed here, or if it would take more than a minute. ``seconds_per_step``: of the baseline.

    Raises:
        UserError: an arm cannot run on this device.
    """
    from ablate.backends.device import default_device

    device = default_device()
    for arm in plan.arms:
        is_for_gpu = arm.resources.num_gpus > 0
        is_for_others = is_for_gpu != (device != "cpu")
        if arm.config.trainer or arm.resources.devices_per_run > 1 or is_for_others:
            return None
    num_steps = (_STEPS + _WARMUP_STEPS) * _TURNS * len(plan.arms)
    if num_steps * seconds_per_step > _LONGEST_SEC:
        return None
    from ablate.execute.throughput import measure
    from ablate.store.records import SpeedSettings

    listener.say("Timing two steps of each arm on this machine …")
    settings = SpeedSettings(steps=_STEPS, warmup=_WARMUP_STEPS, repeats=1)
    return measure(plan.study, plan.arms, plan.baseline, device, settings=settings)
