"""``pilot_study``: what ``ablate pilot`` does: two runs of the baseline, and what they say of the study.

The runs are the study's own, so ``run_study`` afterwards trains only what is missing.

How it fails: as ``run_study`` does; without two results there is no advice.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from ablate.base.errors import UserError
from ablate.base.files import write_bytes_atomic
from ablate.plan import build_plan, known_plan, read_progress
from ablate.store import END_STATES, StudyStore
from ablate.study import load_study
from ablate.workflow import Listener
from ablate.workflow.run import run_study

if TYPE_CHECKING:
    from pathlib import Path

    from ablate.plan import Plan
    from ablate.plan.pilot import Advice, Curve
    from ablate.study import Study
    from ablate.workflow import StudyEnd, Where

_SEEDS = 2


def pilot_study(
    study: str | Path,
    where: Where,
    listener: Listener | None = None,
    *,
    write: bool = False,
    retry_failed: bool = False,
) -> tuple[StudyEnd, Advice | None]:
    """Train the baseline of a study with its first two seeds, and say what they mean for the whole.

    ``write``: put the target into the file, in the place of ``target: null``. The advice is None where a run
    has no result.

    Raises:
        UserError: as ``run_study``; a study of one seed; nothing in the file that could be replaced.
    """
    listener = listener or Listener()
    loaded = load_study(study)
    if write and loaded.target is not None:
        raise UserError(f"--write: {study} has a target already (leave out --write, and change it by hand)")
    plan = build_plan(loaded)
    seeds = [run.seed for run in plan.arm(plan.baseline).runs[:_SEEDS]]
    if len(seeds) < _SEEDS:
        raise UserError(f"{study}: a pilot needs two seeds, and the study has one (set seeds: 2 or more)")
    end = run_study(
        study, where, listener, only=[plan.baseline], seeds=seeds, retry_failed=retry_failed, as_pilot=True
    )
    store = StudyStore(where.storage / plan.study)
    if not end.is_done:
        return end, None
    advice = _advice(known_plan(plan, store), store, seeds, listener, here=where.address is None)
    if write and advice.take is not None:
        _write(loaded, advice)
    return end, advice


def _advice(plan: Plan, store: StudyStore, seeds: list[int], listener: Listener, *, here: bool) -> Advice:
    from ablate.plan.pilot import advise, merged_speeds
    from ablate.workflow.speeds import arm_speeds

    progress, emulated = read_progress(plan, store), False
    base = plan.arm(plan.baseline)
    speed = progress.tokens_per_sec.get(base.name)
    left = any(progress.state(run.id) not in END_STATES for _, run in plan.runs())
    if here and speed is not None and left:
        timed = arm_speeds(
            plan.arms, base.name, listener, seconds_per_step=base.batches.tokens_per_step / speed
        )
        if timed is not None:
            emulated = any(one.backend_mode == "emulated" for one in timed[0])
            progress = merged_speeds(progress, base.name, {one.arm: one.median for one in timed[0]})
    curves = [_curve(store, run.id, run.seed) for run in base.runs if run.seed in seeds]
    return replace(advise(plan, curves, progress, cores=os.cpu_count() or 1), emulated=emulated)


def _curve(store: StudyStore, run_id: str, seed: int) -> Curve:
    from ablate.plan.pilot import Curve

    run = store.run(run_id)
    rows = {row["tokens"]: row["val_loss"] for row in run.metrics("eval")}
    tokens = sorted(rows)
    losses = [rows[at] for at in tokens]
    return Curve(seed=seed, tokens=tokens, val_loss=losses, diverged=run.state() == "diverged")


def _write(study: Study, advice: Advice) -> None:
    from ablate.plan.pilot import with_target

    assert advice.take is not None
    line = study.source.place(("target",)).line
    text = with_target(study.path.read_text(encoding="utf-8"), line, advice.take)
    if text is None:
        raise UserError(f"--write: {study.path}:{line}: no line that says 'target: null' (write it by hand)")
    write_bytes_atomic(study.path, text.encode())
