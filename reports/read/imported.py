"""What every importer makes: runs as plain data, and a run store of them.

The runs of one arm must agree in every setting that a log tells, unless the user waives one by name; where
arms differ in a setting the report's table of arms shows it. A log does not tell the budget of a run that
diverged: it counts with the longest run of the study, as if it had been meant to go as far.

How it fails: a run that does not parse is a line in ``faults``, and the rest goes on; what leaves no study at
all (an arm without runs, settings that disagree within an arm) is a ``UserError``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import shutil
from collections import Counter
from dataclasses import dataclass, field, replace
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
PRECISION = {f"lowest_numerical_precision_in_{part}": part for part in ("linear", "attn", "comm")}
"""The settings that are the recipe, by MLPerf's keys: of linear layers, attention and communication."""


@dataclass(frozen=True, kw_only=True)
class ImportedRun:
    """One run of a log.

    ``evals`` are (tokens, validation loss in nats per token); ``in_bf16`` the losses of a second evaluation
    in bf16, by tokens; ``throughput`` (tokens, tokens per second).
    ``settings`` is what makes runs comparable: batch, learning rate, data, hardware; never the seed, which is
    None where the log does not tell it. ``source`` names it for people; ``content`` is hashed to its id.
    """

    source: str
    content: bytes
    seed: int | None
    evals: tuple[tuple[int, float], ...]
    in_bf16: Mapping[int, float] = field(default_factory=dict)
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
    """Arms by name with their runs, and how they are to be compared; without a target by final losses.

    ``hardware``: ``8x NVIDIA H100``, what the user says that all runs had. ``constant_from``: the tokens from
    which, as the user says, the learning rate was constant in all runs.
    """

    name: str
    arms: Mapping[str, Sequence[ImportedRun]]
    baseline: str
    target: Target | None
    hardware: str | None = None
    constant_from: int | None = None
    paired_seeds: bool = False
    description: str | None = None
    waived: tuple[str, ...] = ()


def write_study(study: ImportedStudy, folder: Path) -> tuple[StudyStore, list[str]]:
    """Write an ordinary run store for a study at ``folder``; returns it and what was left out, line by line.

    A second import of the same logs writes the same store; another study of that name is refused.

    Raises:
        UserError: an arm without runs, an unknown baseline, runs of one arm that do not compare, a log in
            two arms, a folder that holds a study of another kind, pairs that no log tells.
    """
    faults: list[str] = []
    arms = {name: _distinct(name, runs, faults) for name, runs in study.arms.items()}
    if study.hardware is not None:
        arms = {name: [_run_on(run, study.hardware) for run in runs] for name, runs in arms.items()}
    if study.constant_from is not None:
        arms = {name: [_constant(run, study.constant_from) for run in runs] for name, runs in arms.items()}
    for name, runs in arms.items():
        if not runs:
            raise UserError(f"arm '{name}' has no run that could be read")
    owner: dict[str, str] = {}
    for name, run in ((name, run) for name, runs in arms.items() for run in runs):
        if (other := owner.setdefault(_run_id(run), name)) != name:
            raise UserError(f"{run.source} is in arm '{other}' and in arm '{name}' (expected one)")
    if study.baseline not in arms:
        raise UserError(f"--baseline: no arm '{study.baseline}' (arms: {', '.join(arms)})")
    arms = {name: _seeded(name, runs, paired=study.paired_seeds) for name, runs in arms.items()}
    if study.paired_seeds and len(arms) > 1:
        seeds = {name: {run.seed for run in runs} for name, runs in arms.items()}
        own = seeds.pop(study.baseline)
        if all(own.isdisjoint(others) for others in seeds.values()):
            raise UserError(
                f"--paired: no arm has a seed of '{study.baseline}', so it pairs nothing (leave --paired out)"
            )
    settings = {name: _common_settings(name, runs, study.waived) for name, runs in arms.items()}
    longest = max(_last(run) for runs in arms.values() for run in runs)
    if study.target is not None and not longest:
        raise UserError(
            "--target: the logs hold final losses alone (no column 'tokens'): leave the option out to "
            "compare those, or see --columns"
        )
    store = StudyStore(folder)
    _make_room(store)
    base = settings[study.baseline]
    entries = tuple(
        _write_arm(store, name, runs, settings[name], base, longest) for name, runs in arms.items()
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


def _run_on(run: ImportedRun, hardware: str) -> ImportedRun:
    """Return a run with the hardware that the user names; raise ``UserError`` where its log tells another."""
    told = run.settings.get("hardware", hardware)
    if told != hardware:
        raise UserError(f"--hardware: {run.source} was trained on {told} (leave the option out)")
    return replace(run, settings={**run.settings, "hardware": hardware})


def _constant(run: ImportedRun, tokens: int) -> ImportedRun:
    """Return a run with the schedule that the user names; raise ``UserError`` where its log tells one."""
    if told := next((key for key in run.settings if "schedule" in key or "decay" in key), None):
        raise UserError(
            f"--constant-from: {run.source} tells {told} {run.settings[told]} itself (leave the option out)"
        )
    return replace(run, settings={**run.settings, "schedule": "constant", "warmup_tokens": tokens})


def machine(hardware: str) -> dict[str, Any]:
    """Return ``8x NVIDIA H100`` as an environment has it, its kind and number of devices.

    Raises:
        UserError: it does not begin with a number of devices.
    """
    count, _, name = hardware.partition("x ")
    if not (count.isdecimal() and int(count) and name.strip()):
        raise UserError(f"--hardware: expected NUMBERx NAME, such as '8x NVIDIA H100', got '{hardware}'")
    return {"gpu": name.strip(), "world_size": int(count)}


def _seeded(arm: str, runs: Sequence[ImportedRun], *, paired: bool) -> list[ImportedRun]:
    """Give the runs whose log tells no seed a free number; raise ``UserError`` where pairs need the seed."""
    known = Counter(run.seed for run in runs if run.seed is not None)
    if paired:
        unknown = next((run for run in runs if run.seed is None), None)
        if unknown is not None:
            raise UserError(
                f"--paired: {unknown.source} (arm '{arm}') tells no seed, so it has no pair: name the "
                "column or group that holds it (seed), or leave --paired out"
            )
        twice = next((seed for seed, count in known.items() if count > 1), None)
        if twice is not None:
            raise UserError(f"--paired: arm '{arm}' has several runs of seed {twice} (leave --paired out)")
    free = (number for number in itertools.count() if number not in known)
    return [run if run.seed is not None else replace(run, seed=next(free)) for run in runs]


def _write_arm(
    store: StudyStore,
    name: str,
    runs: Sequence[ImportedRun],
    own: dict[str, Any],
    base: dict[str, Any],
    longest: int,
) -> LockedArm:
    """Write an arm's runs. ``own``, ``base``: its settings and the baseline's; ``longest`` run: in tokens."""
    keys = dict.fromkeys((*base, *own))
    differs = {key: (base.get(key), own.get(key)) for key in keys if base.get(key) != own.get(key)}
    told = [f"{part} {own[key]}" for key, part in PRECISION.items() if own.get(key)]
    tokens = [_write_run(store, run, longest) for run in runs]
    entries = tuple(LockedRun(id=_run_id(run), seed=run.seed or 0) for run in runs)
    return LockedArm(
        name=name,
        recipe=f"as logged{': ' if told else ''}{', '.join(told)}",
        tokens=max(tokens),
        differs=differs,
        runs=entries,
    )


def _last(run: ImportedRun) -> int:
    return run.evals[-1][0] if run.evals else 0


def _write_run(store: StudyStore, run: ImportedRun, longest: int) -> int:
    """Write one run; returns its budget in tokens."""
    target = store.run(_run_id(run))
    last = _last(run)
    budget = longest if run.state == "diverged" else last
    target.create({"training": {"tokens": budget, **run.settings}, "seed": run.seed, "source": run.source})
    devices = machine(run.settings["hardware"]) if "hardware" in run.settings else {}
    write_record(
        target.environment_path,
        {**run.environment, **devices, "backend": IMPORTED, "backend_mode": IMPORTED, "timing_valid": False},
    )
    rows = [
        {"kind": "train", "tokens": tokens, "step": step, "tokens_per_sec": rate}
        for step, (tokens, rate) in enumerate(run.throughput, 1)
    ]
    rows += [
        {"kind": "eval", "tokens": tokens, "step": step, "val_loss": loss}
        | ({"val_loss_bf16": run.in_bf16[tokens]} if tokens in run.in_bf16 else {})
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
    return budget
