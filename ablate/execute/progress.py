"""The progress of a study, from the run store alone: for the live table and for ``ablate status``.

The newest values of a file are cached until it changes, and lie near its end, so a read costs little.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean
from typing import TYPE_CHECKING

from ablate.store import END_STATES
from ablate.store.metrics import new_lines, number_in, parse_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from ablate.store import RunDir, State, Status, StudyStore
    from ablate.store.plan_file import LockedPlan

_SHOWN = {
    "train": ("tokens", "time_unix", "loss", "tokens_per_sec"),
    "eval": ("tokens", "time_unix", "val_loss"),
}
_TAIL_BYTES = 1 << 20
_WAITING = ("pending", "interrupted", "damaged")


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """One run at one moment. Losses are in nats per token.

    ``pace``: seconds per token since the worker's start, loading and evaluations included; None: unknown.
    ``eager``: why steps on a GPU are no CUDA graphs; None: they are, or it was not asked for.
    """

    run_id: str
    arm: str
    seed: int
    state: State = "pending"
    tokens: int = 0
    budget: int
    loss: float | None = None
    val_loss: float | None = None
    tokens_per_sec: float | None = None
    message: str | None = None
    pace: float | None = None
    eager: str | None = None

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the end of the budget at its pace; None unless it is running at a known one."""
        if self.state != "running" or self.pace is None:
            return None
        return max(0, self.budget - self.tokens) * self.pace


def read_progress(
    store: StudyStore,
    plan: LockedPlan,
    only: Iterable[str] | None = None,
    *,
    executor_alive: bool | None = True,
    examines_files: bool = False,
) -> list[RunProgress]:
    """Read the progress of the plan's runs, or of those with the ids ``only``, in the plan's order.

    ``executor_alive=False`` reads ``running`` as interrupted: nobody runs the study. None: unknown.
    ``examines_files``: check the files of ended runs for damage.
    """
    wanted = None if only is None else set(only)
    begun = store.begun()
    runs = []
    for arm, planned in plan.runs():
        if wanted is not None and planned.id not in wanted:
            continue
        run = RunProgress(
            run_id=planned.id,
            arm=arm.name,
            seed=planned.seed,
            budget=arm.tokens or 0,
        )
        if planned.id in begun:
            run = _with_files(run, store.run(planned.id), examines_files=examines_files)
        if not executor_alive:
            run = replace(run, pace=None)
        if run.state == "running" and executor_alive is False:
            run = replace(run, state="interrupted", message="its executor is gone")
        runs.append(run)
    return runs


def _with_files(
    progress: RunProgress, run: RunDir, *, examines_files: bool
) -> RunProgress:
    """Fill in what the files of a run that has begun say."""
    status = run.examined() if examines_files else run.status()
    newest: dict[str, float | None] = {}
    if status.state != "damaged" and run.metrics_path.exists():
        file = run.metrics_path.stat()
        newest = _newest(run.metrics_path, file.st_ino, file.st_size)
    return replace(
        progress,
        state=status.state,
        tokens=max(int(newest.get("tokens") or 0), status.tokens),
        loss=newest.get("loss"),
        val_loss=newest.get("val_loss"),
        tokens_per_sec=newest.get("tokens_per_sec"),
        message=status.message,
        pace=_pace(status, newest),
        eager=_eager(run) if examines_files else None,
    )


@lru_cache(maxsize=100_000)
def _newest(path: Path, _file: int, size: int) -> dict[str, float | None]:
    """Read the newest values of a run's rows, all of them only if the end of the file lacks a kind of row."""
    values: dict[str, float | None] = {}
    missing = {f'"{kind}"'.encode(): names for kind, names in _SHOWN.items()}
    for start in (max(0, size - _TAIL_BYTES), 0):
        for line in reversed(new_lines(path, start)[0]):
            for kind in [kind for kind in missing if kind in line]:
                (row,) = parse_rows([line])
                if isinstance(row, dict):
                    values = {
                        name: number_in(row, name) for name in missing.pop(kind)
                    } | values
            if not missing:
                return values
    return values


def _pace(status: Status, newest: Mapping[str, float | None]) -> float | None:
    """Return a run's seconds per token, None before its first evaluation.

    After an interruption it is the pace of the newest rows, because the time since the start has a gap.
    """
    tokens, time_unix = newest.get("tokens"), newest.get("time_unix")
    if newest.get("val_loss") is None or not tokens:
        return None
    if status.attempt > 1 or status.started_unix is None:
        rate = newest.get("tokens_per_sec")
        return 1 / rate if rate else None
    end = status.ended_unix if status.state in END_STATES else None
    return max(0.0, (end or time_unix or 0.0) - status.started_unix) / tokens


def _eager(run: RunDir) -> str | None:
    environment = run.recorded()
    if environment.get("gpu"):
        return environment.get("step_eager_because")
    return None


def count_states(runs: Iterable[RunProgress]) -> dict[str, int]:
    """Count the runs in each state; a state without runs has no entry."""
    return dict(Counter(run.state for run in runs))


def seconds_to_end(runs: Iterable[RunProgress]) -> float | None:
    """Estimate the seconds until all these runs have ended, with as many at once as now.

    None while no run is running or no pace is known. An arm of unknown pace gets the mean of the other arms.
    Runs that failed or were stopped do not count.
    """
    runs = list(runs)
    by_arm: dict[str, list[float]] = {}
    for run in runs:
        if run.pace is not None:
            by_arm.setdefault(run.arm, []).append(run.pace)
    paces = {arm: fmean(paces_of_arm) for arm, paces_of_arm in by_arm.items()}
    if not paces:
        return None
    mean_pace = fmean(paces.values())
    running_sec = []
    waiting_sec = 0.0
    for run in runs:
        seconds = (run.pace or paces.get(run.arm, mean_pace)) * max(
            0, run.budget - run.tokens
        )
        if run.state == "running":
            running_sec.append(seconds)
        elif run.state in _WAITING:
            waiting_sec += seconds
    if not running_sec:
        return None
    return max(*running_sec, (sum(running_sec) + waiting_sec) / len(running_sec))
