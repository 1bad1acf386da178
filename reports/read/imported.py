"""What every importer makes: runs as plain data, and a run store of them.

The runs of one arm must agree in every setting that a log tells, unless the user waives one by name; where
arms differ in a setting the report's table of arms shows it.

How it fails: a run that does not parse is a line in ``faults``, and the rest goes on; what leaves no study at
all (an arm without runs, settings that disagree within an arm) is a ``UserError``.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ablate.base.errors import UserError
from ablate.base.files import write_bytes_atomic, write_record
from ablate.store import Status, StudyStore
from ablate.store.lock import LockedArm, LockedPlan, LockedRun, Target

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from ablate.store import State

IMPORTED = "imported"
"""``backend_mode`` of runs whose arithmetic and timing are known from a log alone."""


@dataclass(frozen=True, kw_only=True)
class ImportedRun:
    """One run of a log.

    ``evals`` are (tokens, validation loss in nats per token); ``throughput`` (tokens, tokens per second).
    ``settings`` is what makes runs comparable: batch, learning rate, data, world size; never the seed.
    ``source`` names it for people; ``content`` is hashed to its id.
    """

    source: str
    content: bytes
    seed: int
    evals: tuple[tuple[int, float], ...]
    state: State = "finished"
    message: str | None = None
    throughput: tuple[tuple[int, float], ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    started_unix: float | None = None
    ended_unix: float | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)


def run_of_losses(
    losses: Mapping[int, float], identity: Sequence[Any], *, state: State = "finished", **told: Any
) -> ImportedRun:
    """Return a run from its losses by tokens; a finished one with a loss that is not finite has diverged.

    ``identity`` is hashed to its id, with the losses; ``told``: other fields of the run.
    """
    finite = sorted((at, loss) for at, loss in losses.items() if math.isfinite(loss))
    diverged = len(finite) < len(losses)
    return ImportedRun(
        content=json.dumps([*identity, finite]).encode(),
        evals=tuple(finite),
        state="diverged" if diverged and state == "finished" else state,
        message="a loss that is not finite" if diverged else None,
        **told,
    )


@dataclass(frozen=True, kw_only=True)
class ImportedStudy:
    """Arms by name with their runs, and how they are to be compared."""

    name: str
    arms: Mapping[str, Sequence[ImportedRun]]
    baseline: str
    target: Target
    paired_seeds: bool = False
    description: str | None = None
    waived: tuple[str, ...] = ()


def write_study(study: ImportedStudy, folder: Path) -> tuple[StudyStore, list[str]]:
    """Write an ordinary run store for a study at ``folder``; returns it and what was left out, line by line.

    A second import of the same logs writes the same store; another study of that name is refused.

    Raises:
        UserError: an arm without runs, an unknown baseline, runs of one arm that do not compare, a folder
            that holds a study of another kind.
    """
    faults: list[str] = []
    arms = {name: _distinct(name, runs, faults) for name, runs in study.arms.items()}
    for name, runs in arms.items():
        if not runs:
            raise UserError(f"arm '{name}' has no run that could be read")
    if study.baseline not in arms:
        raise UserError(f"--baseline: no arm '{study.baseline}' (arms: {', '.join(arms)})")
    settings = {name: _common_settings(name, runs, study.waived) for name, runs in arms.items()}
    store = StudyStore(folder)
    _make_room(store)
    base = settings[study.baseline]
    entries = tuple(
        _write_arm(store, name, runs, settings[name], {} if name == study.baseline else base)
        for name, runs in arms.items()
    )
    store.write_plan(
        LockedPlan(
            study=study.name,
            description=study.description,
            baseline=study.baseline,
            target=study.target,
            paired_seeds=study.paired_seeds,
            training=base,
            arms=entries,
            imported=True,
        )
    )
    return store, faults


def _make_room(store: StudyStore) -> None:
    """Remove an earlier import of that name; raise ``UserError`` for a study of another kind."""
    if not store.plan_path.exists():
        return
    try:
        imported = store.plan().imported
    except UserError:
        imported = False
    if not imported:
        raise UserError(f"{store.path} holds a study that was not imported: choose another --study")
    shutil.rmtree(store.path / "runs", ignore_errors=True)


def _distinct(arm: str, runs: Sequence[ImportedRun], faults: list[str]) -> list[ImportedRun]:
    """Drop copies of a log: they would make the intervals too narrow."""
    known: dict[str, ImportedRun] = {}
    for run in runs:
        first = known.setdefault(_run_id(run), run)
        if first is not run:
            faults.append(f"{run.source}: same content as {first.source} (arm '{arm}'): counted once")
    return list(known.values())


def _run_id(run: ImportedRun) -> str:
    return hashlib.sha256(run.content).hexdigest()[:16]


def _common_settings(arm: str, runs: Sequence[ImportedRun], waived: Iterable[str]) -> dict[str, Any]:
    """Return the settings that all runs share; raise ``UserError`` where they differ in one not waived."""
    common: dict[str, Any] = {}
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        values = [json.dumps(run.settings.get(key)) for run in runs]
        if len(set(values)) == 1:
            common[key] = runs[0].settings.get(key)
        elif key not in waived:
            usual = Counter(values).most_common(1)[0][0]
            odd, run = next(pair for pair in zip(values, runs, strict=True) if pair[0] != usual)
            raise UserError(
                f"arm '{arm}': its runs differ in {key} ({odd} in {run.source}, {usual} in most) and cannot "
                f"be pooled; make two arms of them, or --waive {key}"
            )
    return common


def _write_arm(
    store: StudyStore, name: str, runs: Sequence[ImportedRun], own: dict[str, Any], base: dict[str, Any]
) -> LockedArm:
    keys = dict.fromkeys((*base, *own)) if base else {}
    differs = {key: (base.get(key), own.get(key)) for key in keys if base.get(key) != own.get(key)}
    tokens = [_write_run(store, run) for run in runs]
    entries = tuple(LockedRun(id=_run_id(run), seed=run.seed) for run in runs)
    return LockedArm(name=name, recipe="as logged", tokens=max(tokens), differs=differs, runs=entries)


def _write_run(store: StudyStore, run: ImportedRun) -> int:
    """Write one run; returns the tokens of its last evaluation."""
    target = store.run(_run_id(run))
    last = run.evals[-1][0] if run.evals else 0
    target.create({"training": {"tokens": last, **run.settings}, "seed": run.seed, "source": run.source})
    write_record(
        target.environment_path,
        {**run.environment, "backend": IMPORTED, "backend_mode": IMPORTED, "timing_valid": False},
    )
    rows = [
        {"kind": "train", "tokens": tokens, "step": step, "tokens_per_sec": rate}
        for step, (tokens, rate) in enumerate(run.throughput, 1)
    ]
    rows += [
        {"kind": "eval", "tokens": tokens, "step": step, "val_loss": loss}
        for step, (tokens, loss) in enumerate(run.evals, 1)
    ]
    # The times of MLflow's rows come from here and must not change from import to import.
    begun = run.started_unix or 0.0
    stamped = ({**row, "time_unix": begun + number} for number, row in enumerate(rows))
    content = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in stamped)
    write_bytes_atomic(target.metrics_path, content.encode())
    target.write_status(
        Status(
            state=run.state, attempt=1, tokens=last, step=len(run.evals), message=run.message,
            started_unix=run.started_unix, ended_unix=run.ended_unix,
        )
    )  # fmt: skip
    return last
