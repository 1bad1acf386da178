"""The progress of a study, from the run store alone: for the live table and for ``ablate status``.

Each read continues in a run's metrics where the last one ended, so it costs only the new rows.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ablate.store import END_STATES
from ablate.store.metrics import new_lines, parse_rows

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ablate.store import State, Status, StudyStore
    from ablate.store.plan_file import LockedArm, LockedRun

_SHOWN = {"train": ("loss", "tokens_per_sec"), "eval": ("val_loss",)}
_LEFT = ("pending", "interrupted", "damaged")


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """One run at one moment. Losses are in nats per token.

    ``pace``: seconds per token since the worker's start, loading and evaluations included; None: unknown.
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

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the end of the budget at the current rate; None unless it is running at a known rate."""
        if self.state != "running" or not self.tokens_per_sec:
            return None
        return max(0, self.budget - self.tokens) / self.tokens_per_sec


@dataclass
class _Tail:
    """The newest values in the rows of a file before ``offset`` (bytes). ``file``: its inode."""

    file: int = 0
    offset: int = 0
    tokens: int = 0
    time_unix: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)

    def read(self, path: Path) -> None:
        """Read the rows after the offset, backwards, until the last row of each kind is found."""
        lines, self.offset = new_lines(path, self.offset)
        seen = set()
        for line in reversed(lines):
            with contextlib.suppress(KeyError, TypeError):  # a damaged line, or a cut one
                if (kind := (row := parse_rows([line])[0])["kind"]) not in seen:
                    tokens, values = row["tokens"], {name: row[name] for name in _SHOWN[kind]}
                    self.tokens, self.values = max(self.tokens, tokens), self.values | values
                    self.time_unix = max(self.time_unix, row.get("time_unix", 0.0))
                    seen.add(kind)
            if len(seen) == len(_SHOWN):
                return


class ProgressReader:
    """Reads the progress of a study's runs repeatedly."""

    def __init__(
        self, store: StudyStore, *, executor_alive: bool | None = True, examines_files: bool = False
    ) -> None:
        """``executor_alive=False`` reads ``running`` as interrupted: nobody runs the study. None: unknown.

        ``examines_files``: check the files of ended runs for damage at each read.
        """
        self._store = store
        self._examines_files = examines_files
        self._executor_alive = executor_alive
        self._tails: dict[str, _Tail] = {}
        plan = store.plan()
        self._runs = list(plan.runs())
        self.may_end_sooner = plan.stop is not None
        """Whether a stop rule may end runs early."""
        self.in_waves = plan.stop is not None and plan.stop.settled is not None
        """Whether a stop rule lets the runs begin in waves, a few seeds at a time."""

    def read(self, only: Iterable[str] | None = None) -> list[RunProgress]:
        """Read the progress of all runs, or of those with the ids ``only``, in the plan's order."""
        wanted = None if only is None else set(only)
        begun = self._store.begun()
        return [
            self._read(arm, run, has_begun=run.id in begun)
            for arm, run in self._runs
            if wanted is None or run.id in wanted
        ]

    def _read(self, arm: LockedArm, planned: LockedRun, *, has_begun: bool) -> RunProgress:
        shown = RunProgress(run_id=planned.id, arm=arm.name, seed=planned.seed, budget=arm.tokens or 0)
        if not has_begun:
            return shown
        run = self._store.run(planned.id)
        status = run.examined() if self._examines_files else run.status()
        tail = self._tails.setdefault(run.run_id, _Tail())
        if status.state == "damaged":
            tail = _Tail()
        elif run.metrics_path.exists():
            found = run.metrics_path.stat()
            if found.st_ino != tail.file or found.st_size < tail.offset:  # a new attempt has its own file
                tail = self._tails[run.run_id] = _Tail(file=found.st_ino)
            if found.st_size != tail.offset:
                tail.read(run.metrics_path)
        shown = replace(
            shown,
            state=status.state,
            tokens=max(tail.tokens, status.tokens),
            message=status.message,
            pace=_pace(status, tail) if self._executor_alive else None,
            **tail.values,
        )
        if status.state == "running" and self._executor_alive is False:
            return replace(shown, state="interrupted", message="its executor is gone")
        return shown


def _pace(status: Status, tail: _Tail) -> float | None:
    """Return a run's seconds per token, None before its first evaluation.

    After an interruption it is the pace of the newest rows, because the time since the start has a gap.
    """
    if "val_loss" not in tail.values or not tail.tokens:
        return None
    if status.attempt > 1 or status.started_unix is None:
        rate = tail.values.get("tokens_per_sec")
        return 1 / rate if rate else None
    end = status.ended_unix if status.state in END_STATES else None
    return max(0.0, (end or tail.time_unix) - status.started_unix) / tail.tokens


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
    paces = {arm: fmean(own) for arm, own in by_arm.items()}

    def left(*states: str) -> list[float]:
        return [
            (run.pace or paces.get(run.arm, fmean(paces.values()))) * max(0, run.budget - run.tokens)
            for run in runs
            if run.state in states
        ]

    if not paces or not (going := left("running")):
        return None
    return max(*going, (sum(going) + sum(left(*_LEFT))) / len(going))
