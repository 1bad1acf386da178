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
    from pathlib import Path

    from ablate.store import RunDir, State, StudyStore
    from ablate.store.lock import LockedArm, LockedRun


_FIRST_LOOK_BYTES = 1 << 13
_KINDS = 2
"""Training steps and evaluations."""


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
    """What the rows of a file said up to an offset in bytes."""

    file: int = 0
    offset: int = 0
    tokens: int = 0
    values: dict[str, float] = field(default_factory=dict)

    def read(self, path: Path) -> None:
        """Take in the rows after the offset; the last of each kind says all that is shown."""
        with path.open("rb") as file:
            file.seek(self.offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self.offset += len(whole)
        lines, seen = whole.splitlines(), set()
        for line in reversed(lines):
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a damaged line, or a cut one
                if (kind := (row := parse_json(line))["kind"]) in seen:
                    continue
                names = ("val_loss",) if kind == "eval" else ("loss", "tokens_per_sec")
                values, tokens = {name: row[name] for name in names}, row["tokens"]
                self.values |= values
                self.tokens = max(self.tokens, tokens)
                seen.add(kind)
            if len(seen) == _KINDS:
                return


class ProgressReader:
    """Reads the progress of a study's runs repeatedly."""

    def __init__(
        self, store: StudyStore, *, executor_alive: bool = True, examines_files: bool = False
    ) -> None:
        """``executor_alive=False`` reads ``running`` as interrupted: no process runs the study.

        ``examines_files``: whether damage to files of ended runs is looked for, at each read.
        """
        self._store = store
        self._examines_files = examines_files
        self._executor_alive = executor_alive
        self._tails: dict[str, _Tail] = {}
        self._runs = list(store.plan().runs())

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


def _not_begun(arm: LockedArm, run: LockedRun) -> RunProgress:
    return RunProgress(
        run_id=run.id, arm=arm.name, seed=run.seed, state="pending", tokens=0, budget=arm.tokens or 0
    )


def count_states(runs: Iterable[RunProgress]) -> dict[str, int]:
    """Return the number of runs in each state that occurs."""
    return dict(Counter(run.state for run in runs))
