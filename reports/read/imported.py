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
import re
import shutil
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ablate.base.errors import UserError
from ablate.base.files import write_bytes_atomic, write_record
from ablate.store import Status, StudyStore
from ablate.store.plan_file import LockedArm, LockedPlan, LockedRun, Target

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet
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
    ``piece``: the run's name and seed, of which another file may hold another piece; None: it is whole.
    """

    source: str
    content: bytes
    seed: int | str | None
    piece: tuple[str, int | str | None] | None = None
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


def tidied(
    arms: Mapping[str, Sequence[ImportedRun]], waived: Sequence[str]
) -> tuple[dict[str, list[ImportedRun]], list[str]]:
    """Join the pieces of each run and number seeds that are text; return the arms and what was done.

    Raises:
        UserError: two files of one run that disagree, or one that begins late and is no known run's piece.
    """
    said: list[str] = []
    joined: dict[str, list[ImportedRun]] = {}
    for arm, runs in arms.items():
        told: dict[object, ImportedRun] = {}
        untold: list[ImportedRun] = []
        for run in sorted(runs, key=lambda run: run.evals[0][0] if run.evals else 0):
            if run.piece == ("", None) and "beginning" not in waived:
                untold = _with_piece(arm, untold, run, said)
            elif run.piece is None or run.piece == ("", None):
                untold.append(run)
            elif (first := told.get(run.piece)) is None:
                told[run.piece] = run
            elif _run_id(run) != _run_id(first):
                told[run.piece] = _joined(arm, first, run, said)
        own = [*told.values(), *untold]
        joined[arm] = [run for run in runs if run in own] + [run for run in own if run not in runs]
    alike: dict[str, list[str]] = {}
    for arm in arms:
        alike.setdefault(arm.casefold(), []).append(arm)
    said += [
        f"arms {' and '.join(names)} differ in case alone: taken as several"
        for names in alike.values()
        if len(names) > 1
    ]
    texts = sorted({run.seed for runs in joined.values() for run in runs if isinstance(run.seed, str)})
    if texts:
        taken = {run.seed for runs in joined.values() for run in runs if isinstance(run.seed, int)}
        numbers = _numbers_of(texts, taken)
        said.append("seeds " + ", ".join(f"'{text}' = {numbers[text]}" for text in texts))
        joined = {
            arm: [replace(run, seed=numbers.get(run.seed, run.seed)) for run in runs]  # type: ignore[arg-type]
            for arm, runs in joined.items()
        }
    return joined, said


def _with_piece(
    arm: str, whole: Sequence[ImportedRun], run: ImportedRun, said: list[str]
) -> list[ImportedRun]:
    """Add a run that has no name; one that begins later than another, with its losses, is a piece of it."""
    tokens = [at for at, _ in run.evals]
    steps = sorted(after - at for at, after in itertools.pairwise(tokens))
    if not steps or not whole or tokens[0] <= whole[0].evals[0][0] + 2 * steps[len(steps) // 2]:
        return [*whole, run]
    firsts = [one for one in whole if _common(one, run) and all(a == b for _, a, b in _common(one, run))]
    if len(firsts) != 1:
        raise UserError(
            f"{run.source} begins at {tokens[0]:,} tokens, {whole[0].source} of the same arm '{arm}' at "
            f"{whole[0].evals[0][0]:,}: is it the rest of a resumed run? (put a run into one file, or name "
            "its run or seed; if they are runs of their own: --waive beginning)"
        )
    return [_joined(arm, firsts[0], run, said) if one is firsts[0] else one for one in whole]


def _common(first: ImportedRun, other: ImportedRun) -> list[tuple[int, float, float]]:
    own = dict(first.evals)
    return [(at, own[at], loss) for at, loss in other.evals if at in own]


def _joined(arm: str, first: ImportedRun, other: ImportedRun, said: list[str]) -> ImportedRun:
    """Return the run of two pieces; raise ``UserError`` where they disagree."""
    common = _common(first, other)
    what = f"{first.source} and {other.source} (arm '{arm}') are of one run by their name or seed"
    hint = "two runs have two names: --run-column; of one that was resumed, keep one file's losses there"
    if odd := next((one for one in common if one[1] != one[2]), None):
        raise UserError(f"{what}, and say {odd[1]:g} and {odd[2]:g} at {odd[0]:,} tokens ({hint})")
    if not common and first.evals and other.evals and other.evals[0][0] < first.evals[-1][0]:
        raise UserError(f"{what}, and the second begins before the first ends, at other tokens ({hint})")
    said.append(f"{first.source} and {other.source} are pieces of one run of arm '{arm}': joined")
    return replace(
        first,
        source=f"{first.source}, {other.source}",
        content=first.content + other.content,
        evals=tuple(sorted({*first.evals, *other.evals})),
        in_bf16={**first.in_bf16, **other.in_bf16},
        state=other.state if first.state == "finished" else first.state,
        message=first.message or other.message,
        throughput=(*first.throughput, *other.throughput),
    )


def _numbers_of(texts: Sequence[str], taken: AbstractSet[int]) -> dict[str, int]:
    """Return a number for each seed that is text: that at its end where no other has it, else a free one."""
    ends = [re.search(r"\d{1,9}$", text) for text in texts]
    found = [int(end[0]) for end in ends if end]
    if len(set(found)) < len(texts) or not taken.isdisjoint(found):
        free = (number for number in itertools.count() if number not in taken)
        found = list(itertools.islice(free, len(texts)))
    return dict(zip(texts, found, strict=True))


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
    entries = tuple(LockedRun(id=_run_id(run), seed=int(run.seed or 0)) for run in runs)
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
    training = (
        {"kind": "train", "tokens": tokens, "step": step, "tokens_per_sec": rate}
        for step, (tokens, rate) in enumerate(run.throughput, 1)
    )
    evaluations = (
        {"kind": "eval", "tokens": tokens, "step": step, "val_loss": loss}
        | ({"val_loss_bf16": run.in_bf16[tokens]} if tokens in run.in_bf16 else {})
        for step, (tokens, loss) in enumerate(run.evals, 1)
    )
    # The times of MLflow's rows come from here and must not change from import to import.
    begun = run.started_unix or 0.0
    rows = itertools.chain(training, evaluations)
    stamped = ({**row, "time_unix": begun + number} for number, row in enumerate(rows))
    as_json = json.JSONEncoder(separators=(",", ":")).encode
    content = "".join(as_json(row) + "\n" for row in stamped)
    write_bytes_atomic(target.metrics_path, content.encode())
    target.write_status(
        Status(
            state=run.state, attempt=1, tokens=last, step=len(run.evals), message=run.message,
            started_unix=run.started_unix, ended_unix=run.ended_unix,
        )
    )  # fmt: skip
    return budget
