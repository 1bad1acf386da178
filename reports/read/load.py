"""Run store → data frames, so that nothing later has to know of files.

How it fails: a file that does not parse never stops a report. Each fault becomes one line in ``faults``,
with file and line, and the rest is read. The last line of a metrics file that a crash cut is no fault.
A missing plan is an error of the caller (``FileNotFoundError``).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pandas as pd

from ablate.base.files import parse_json
from ablate.store import DAMAGED, StudyStore
from ablate.store.leases import Leases
from ablate.store.records import config_from_json, environment_from_json, speed_from_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ablate.store.leases import Attempt
    from ablate.store.lock import LockedPlan
    from ablate.store.records import Environment, RecordedConfig, SpeedRecord

T = TypeVar("T")
_THROUGHPUT_SAMPLES = 200
_MOST_TOKENS = 1 << 62
_LARGEST = 1e300

RUN_COLUMNS = (
    "run_id",
    "arm",
    "seed",
    "state",
    "attempt",
    "tokens",
    "message",
    "started_unix",
    "ended_unix",
    "budget_tokens",
    "tokens_per_sec",
    "backend_mode",
    "timing_valid",
)
EVAL_COLUMNS = ("run_id", "arm", "seed", "tokens", "step", "val_loss")


@dataclass(frozen=True, kw_only=True)
class StudyFrames:
    """A study as plain data.

    ``runs`` has one row for each run of the plan, ``evals`` one for each evaluation (``val_loss`` in nats
    per token, ordered by run and tokens, each token count once). ``configs`` maps an arm to the resolved
    configuration of its first run that has one; ``environments`` maps a run id to what it ran on, and
    ``attempts`` to when and where its last attempt was. ``throughput``: what ``ablate throughput`` measured.
    """

    plan: LockedPlan
    runs: pd.DataFrame
    evals: pd.DataFrame
    configs: dict[str, RecordedConfig]
    environments: dict[str, Environment]
    attempts: dict[str, Attempt]
    throughput: SpeedRecord | None
    faults: tuple[str, ...]


def load_frames(store: StudyStore) -> StudyFrames:
    """Read a study's run store.

    Raises:
        FileNotFoundError: the study never ran here.
        UserError: the plan cannot be read.
    """
    plan = store.plan()
    faults: list[str] = []
    run_rows: list[dict[str, Any]] = []
    curves: list[_Evaluations] = []
    configs: dict[str, RecordedConfig] = {}
    environments: dict[str, Environment] = {}
    attempts: dict[str, Attempt] = {}
    for arm in plan.arms:
        for entry in arm.runs:
            run = store.run(entry.id)
            config = _read(run.path / "config.json", config_from_json, faults)
            environment = _read(run.environment_path, environment_from_json, faults)
            status = run.status()
            if status.message == DAMAGED:
                faults.append(f"{run.path / 'status.json'}: not a status")
            if config and config.whole:
                configs.setdefault(arm.name, config)
            if environment and environment.whole:
                environments[run.run_id] = environment
            if attempt := Leases(run.attempts).read(status.attempt):
                attempts[run.run_id] = attempt
            evals, tokens_per_sec = _read_metrics(run.metrics_path, faults)
            who = {"run_id": run.run_id, "arm": arm.name, "seed": entry.seed}
            curves.append(evals)
            run_rows.append(
                who
                | {
                    "state": status.state,
                    "attempt": status.attempt,
                    "tokens": status.tokens,
                    "message": status.message,
                    "started_unix": status.started_unix,
                    "ended_unix": status.ended_unix,
                    "budget_tokens": ((config and config.training) or plan.training).get("tokens"),
                    "tokens_per_sec": tokens_per_sec,
                    "backend_mode": environment and environment.backend_mode,
                    "timing_valid": environment is not None and environment.timing_valid,
                }
            )
    return StudyFrames(
        plan=plan,
        runs=pd.DataFrame(run_rows, columns=list(RUN_COLUMNS)),
        evals=_one_frame(run_rows, curves),
        configs=configs,
        environments=environments,
        attempts=attempts,
        throughput=_read(store.throughput_path, speed_from_json, faults),
        faults=tuple(faults),
    )


def _one_frame(runs: list[dict[str, Any]], curves: list[_Evaluations]) -> pd.DataFrame:
    """Put all runs' evaluations into one frame at once: a frame for each of a thousand takes seconds."""
    if not any(len(curve.tokens) for curve in curves):
        return pd.DataFrame(columns=list(EVAL_COLUMNS))
    sizes = [len(curve.tokens) for curve in curves]
    whose = {
        name: np.repeat(np.array([run[name] for run in runs], dtype=kind), sizes)
        for name, kind in (("run_id", object), ("arm", object), ("seed", np.int64))
    }
    measured = {
        name: np.concatenate([getattr(curve, name) for curve in curves])
        for name in ("tokens", "step", "val_loss")
    }
    return pd.DataFrame(whose | measured)


def _read(path: Path, parse: Callable[[object], T], faults: list[str]) -> T | None:
    """Return what a JSON file holds, None where it is absent or damaged (which is then a fault)."""
    try:
        content = parse_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        faults.append(f"{path}: not JSON: {error}")
        return None
    try:
        return parse(content)
    except ValueError as error:
        faults.append(f"{path}: {error}")
        return None


@dataclass(frozen=True, kw_only=True)
class _Evaluations:
    """One run's evaluations, ordered by tokens."""

    tokens: np.ndarray
    step: np.ndarray
    val_loss: np.ndarray


def _read_metrics(path: Path, faults: list[str]) -> tuple[_Evaluations, float | None]:
    """Return the evaluations and the median training throughput in tokens/s.

    Training rows are many and only their throughput is wanted, so that just a sample of them is parsed.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        content = b""
    lines = content[: content.rfind(b"\n") + 1].split(b"\n")
    evals: dict[int, tuple[int, float]] = {}
    dropped = 0
    for row in _parse(path, [(i, line) for i, line in enumerate(lines, 1) if b'"eval"' in line], faults):
        if _is_finite(row["val_loss"]):
            # An evaluation written twice (a resume from an older checkpoint) counts once: the last one.
            step = row.get("step")
            step = step if type(step) is int and 0 <= step < _MOST_TOKENS else 0
            evals[row["tokens"]] = (step, float(row["val_loss"]))
        else:
            dropped += 1
    if dropped:
        faults.append(f"{path}: {dropped} evaluations without a finite loss left out")
    tokens = sorted(evals)
    found = _Evaluations(
        tokens=np.array(tokens, dtype=np.int64),
        step=np.array([evals[t][0] for t in tokens], dtype=np.int64),
        val_loss=np.array([evals[t][1] for t in tokens], dtype=np.float64),
    )
    return found, _throughput([line for line in lines if b'"tokens_per_sec"' in line])


def _parse(path: Path, lines: list[tuple[int, bytes]], faults: list[str]) -> list[dict[str, Any]]:
    """Parse evaluation rows: all at once, and one by one only where that fails."""
    try:
        rows = parse_json(b"[" + b",".join(line for _, line in lines) + b"]")
        if len(rows) == len(lines) and all(_is_evaluation(row) for row in rows):
            return list(rows)
    except ValueError:
        pass
    good = []
    for number, line in lines:
        try:
            row = parse_json(line)
        except ValueError as error:
            faults.append(f"{path}:{number}: not JSON: {error}")
            continue
        if _is_evaluation(row):
            good.append(row)
        elif not (isinstance(row, dict) and row.get("kind") != "eval"):
            faults.append(f"{path}:{number}: an evaluation needs the numbers 'tokens' and 'val_loss'")
    return good


def _is_evaluation(row: object) -> bool:
    return (
        isinstance(row, dict)
        and row.get("kind") == "eval"
        and type(row.get("tokens")) is int
        and 0 <= row["tokens"] < _MOST_TOKENS
        and type(row.get("val_loss")) in (int, float)
    )


def _throughput(lines: list[bytes]) -> float | None:
    sample = lines[:: max(1, len(lines) // _THROUGHPUT_SAMPLES)]
    try:
        rows = parse_json(b"[" + b",".join(sample) + b"]")
    except ValueError:  # a damaged line among them: each for itself
        rows = [row for line in sample for row in _object(line)]
    values = [
        value
        for row in rows
        if isinstance(row, dict)
        and isinstance(value := row.get("tokens_per_sec"), int | float)
        and _is_finite(value)
    ]
    return float(statistics.median(values)) if values else None


def _is_finite(value: float) -> bool:
    """Tell whether a number is one to reckon with; an integer of JSON may be larger than any float."""
    return -_LARGEST < value < _LARGEST


def _object(line: bytes) -> list[Any]:
    try:
        return [parse_json(line)]
    except ValueError:
        return []
