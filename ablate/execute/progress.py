"""The progress of a study, from the run store alone: for the live table and for ``ablate status``.

Each read continues where the last one ended in a run's metrics, so it costs only the new rows.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ablate.store import END_STATES
from ablate.store.leases import Leases
from ablate.store.metrics import new_lines, parse_rows

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ablate.store import RunDir, State, Status, StudyStore
    from ablate.store.leases import Attempt
    from ablate.store.plan_file import LockedArm, LockedRun


_FIRST_LOOK_BYTES = 1 << 13
_ENDED_OF_AN_ARM = 3
_KINDS = 2
"""Training steps and evaluations."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds from a worker's start of a run to its first token, and for each token from then on."""

    sec_to_begin: float
    sec_per_token: float

    def seconds(self, tokens: int, *, begun: bool) -> float:
        """Return the time for these tokens."""
        return tokens * self.sec_per_token + (0.0 if begun else self.sec_to_begin)


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """One run at one moment. Losses are in nats per token."""

    run_id: str
    arm: str
    seed: int
    state: State
    tokens: int
    budget: int
    loss: float | None = None
    val_loss: float | None = None
    tokens_per_sec: float | None = None
    message: str | None = None
    pace: Pace | None = None

    @property
    def seconds_left(self) -> float | None:
        """Time to the end of the budget at the current rate."""
        if self.state != "running" or not self.tokens_per_sec:
            return None
        return max(0, self.budget - self.tokens) / self.tokens_per_sec


@dataclass
class _Tail:
    """What the rows of a file said up to an offset in bytes."""

    file: int = 0
    offset: int = 0
    tokens: int = 0
    step: int = 0
    time_unix: float = 0.0
    values: dict[str, float] = field(default_factory=dict)
    first: tuple[float, int] | None = None
    """Time and tokens of the file's first row."""

    def read(self, path: Path) -> None:
        """Take in the rows after the offset; the last of each kind says all that is shown."""
        lines, self.offset = new_lines(path, self.offset)
        seen = set()
        for line in reversed(lines):
            with contextlib.suppress(KeyError, TypeError):  # a damaged line, or a cut one
                if (kind := (row := parse_rows([line])[0])["kind"]) in seen:
                    continue
                names = ("val_loss",) if kind == "eval" else ("loss", "tokens_per_sec")
                values, tokens = {name: row[name] for name in names}, row["tokens"]
                self.values |= values
                self.tokens = max(self.tokens, tokens)
                self.step = max(self.step, row.get("step", 0))
                self.time_unix = max(self.time_unix, row.get("time_unix", 0.0))
                seen.add(kind)
            if len(seen) == _KINDS:
                return


class ProgressReader:
    """Reads the progress of a study's runs repeatedly."""

    def __init__(
        self, store: StudyStore, *, executor_alive: bool | None = True, examines_files: bool = False
    ) -> None:
        """``executor_alive=False`` reads ``running`` as interrupted: nobody runs the study. None: unknown.

        ``examines_files``: whether damage to files of ended runs is looked for, at each read.
        """
        self._store = store
        self._examines_files = examines_files
        self._executor_alive = executor_alive
        self._tails: dict[str, _Tail] = {}
        self._ended: dict[str, set[str]] = {}
        self._attempts: dict[tuple[str, int], Attempt] = {}
        plan = store.plan()
        self._runs = list(plan.runs())
        self.may_end_sooner = plan.stop is not None
        """Whether a rule may find runs not needed."""
        self.in_waves = plan.stop is not None and plan.stop.settled is not None
        """Whether runs are asked for seed by seed."""

    def read(self, only: Iterable[str] | None = None) -> list[RunProgress]:
        """Return the progress of all runs, or of those with these ids, in the plan's order."""
        wanted = None if only is None else set(only)
        begun = self._store.begun()
        return [
            self._read(arm, run) if run.id in begun else _not_begun(arm, run)
            for arm, run in self._runs
            if wanted is None or run.id in wanted
        ]

    def _read(self, arm: LockedArm, planned: LockedRun) -> RunProgress:
        run = self._store.run(planned.id)
        status = run.examined() if self._examines_files else run.status()
        tail = _Tail() if status.state == "damaged" else self._tail(run)
        state, message = status.state, status.message
        if state == "running" and self._executor_alive is False:
            state, message = "interrupted", "its executor is gone"
        return RunProgress(
            run_id=run.run_id,
            arm=arm.name,
            seed=planned.seed,
            state=state,
            tokens=max(tail.tokens, status.tokens),
            budget=arm.tokens or 0,
            message=message,
            pace=self._pace(run, arm.name, status, tail) if self._executor_alive else None,
            **tail.values,
        )

    def _pace(self, run: RunDir, arm: str, status: Status, tail: _Tail) -> Pace | None:
        """Return the pace of a run's latest attempt, None before its first evaluation.

        Of an arm's ended runs a few are enough.
        """
        if "val_loss" not in tail.values or not tail.step:
            return None
        if status.state in END_STATES:
            known = self._ended.setdefault(arm, set())
            if run.run_id not in known and len(known) == _ENDED_OF_AN_ARM:
                return None
            known.add(run.run_id)
        key = run.run_id, status.attempt
        if key not in self._attempts:
            record = Leases(run.attempts).read(status.attempt)
            if record is None or record.fingerprint is None:  # where it went on from is not noted yet
                return None
            self._attempts[key] = record
        attempt = self._attempts[key]
        if tail.first is None:
            tail.first = _first_row(run.metrics_path)
        begun, tokens = tail.first
        if begun <= attempt.started_unix:  # rows of an attempt before
            begun, tokens = attempt.started_unix, attempt.resumed_from_step * tail.tokens // tail.step
        if tail.tokens <= tokens or tail.time_unix <= begun:
            return None
        pace = (tail.time_unix - begun) / (tail.tokens - tokens)
        waited = begun - attempt.started_unix - pace * tokens
        return Pace(sec_to_begin=max(0.0, waited), sec_per_token=pace)

    def _tail(self, run: RunDir) -> _Tail:
        tail = self._tails.setdefault(run.run_id, _Tail())
        try:
            found = run.metrics_path.stat()
        except FileNotFoundError:
            return tail
        if found.st_ino != tail.file or found.st_size < tail.offset:  # a new attempt has its own file
            # The last rows say it all, unless no evaluation is among them.
            tail = self._tails[run.run_id] = _Tail(file=found.st_ino)
            tail.offset = max(0, found.st_size - _FIRST_LOOK_BYTES)
            if tail.offset:
                tail.read(run.metrics_path)
                if "val_loss" in tail.values:
                    return tail
                tail = self._tails[run.run_id] = _Tail(file=found.st_ino)
        if found.st_size != tail.offset:
            tail.read(run.metrics_path)
        return tail


def _first_row(path: Path) -> tuple[float, int]:
    """Return time and tokens of a file's first row."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        row = parse_rows(new_lines(path, most_bytes=1)[0])[0]
        return float(row["time_unix"]), int(row["tokens"])
    return 0.0, 0


def _not_begun(arm: LockedArm, run: LockedRun) -> RunProgress:
    return RunProgress(
        run_id=run.id, arm=arm.name, seed=run.seed, state="pending", tokens=0, budget=arm.tokens or 0
    )


def count_states(runs: Iterable[RunProgress]) -> dict[str, int]:
    """Return the number of runs in each state that occurs."""
    return dict(Counter(run.state for run in runs))
