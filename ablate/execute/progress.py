"""The progress of a study, from the run store alone: for the live table and for ``ablate status``.

Each read continues where the last one ended in a run's metrics, so it costs only the new rows.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ablate.base.files import parse_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ablate.store import RunDir, State, StudyStore
    from ablate.store.lock import LockedArm, LockedRun


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

    @property
    def seconds_left(self) -> float | None:
        """Time to the end of the budget at the current rate."""
        if self.state != "running" or not self.tokens_per_sec:
            return None
        return max(0, self.budget - self.tokens) / self.tokens_per_sec


@dataclass
class _Tail:
    file: int = 0
    offset: int = 0
    tokens: int = 0
    values: dict[str, float] = field(default_factory=dict)


class ProgressReader:
    """Reads the progress of a study's runs repeatedly."""

    def __init__(self, store: StudyStore, *, executor_alive: bool = True) -> None:
        """``executor_alive=False`` reads ``running`` as interrupted: no process runs the study."""
        self._store = store
        self._executor_alive = executor_alive
        self._tails: dict[str, _Tail] = {}
        self._runs = list(store.plan().runs())

    def read(self, only: Iterable[str] | None = None) -> list[RunProgress]:
        """Return the progress of all runs, or of those with these ids, in the plan's order."""
        wanted = None if only is None else set(only)
        return [self._read(arm, run) for arm, run in self._runs if wanted is None or run.id in wanted]

    def _read(self, arm: LockedArm, planned: LockedRun) -> RunProgress:
        run = self._store.run(planned.id)
        status, tail = run.status(), self._tail(run)
        state, message = status.state, status.message
        if state == "running" and not self._executor_alive:
            state, message = "interrupted", "its executor is gone"
        return RunProgress(
            run_id=run.run_id,
            arm=arm.name,
            seed=planned.seed,
            state=state,
            tokens=max(tail.tokens, status.tokens),
            budget=arm.tokens or 0,
            message=message,
            **tail.values,
        )

    def _tail(self, run: RunDir) -> _Tail:
        tail = self._tails.setdefault(run.run_id, _Tail())
        try:
            found = run.metrics_path.stat()
        except FileNotFoundError:
            return tail
        if found.st_ino != tail.file or found.st_size < tail.offset:  # a new attempt has its own file
            tail = self._tails[run.run_id] = _Tail(file=found.st_ino)
        if found.st_size == tail.offset:
            return tail
        with run.metrics_path.open("rb") as file:
            file.seek(tail.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                tail.offset += len(line)
                with contextlib.suppress(ValueError, KeyError, TypeError):  # skip a damaged line
                    row = parse_json(line)
                    tail.tokens = row["tokens"]
                    names = ("val_loss",) if row["kind"] == "eval" else ("loss", "tokens_per_sec")
                    tail.values |= {name: row[name] for name in names}
        return tail


def count_states(runs: Iterable[RunProgress]) -> dict[str, int]:
    """Return the number of runs in each state that occurs."""
    return dict(Counter(run.state for run in runs))
