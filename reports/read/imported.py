"""The result of every importer: runs as plain data, and a run store of them.

The runs of one arm must agree in every setting in their logs, unless the user waives one by name; the
report's table of arms shows the settings in which arms differ. A log does not say the budget of a diverged
run: it gets that of the study's longest run.

How it fails: a ``UserError`` if no study is possible (an arm without runs, settings that disagree within an
arm, files that disagree on one run).
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
from ablate.run.loss_units import stored_unit
from ablate.store import Status, StudyStore
from ablate.store.plan_file import LockedArm, LockedPlan, LockedRun

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ablate.run.loss_units import LoggedUnit
    from ablate.store import State
    from ablate.store.plan_file import Target

    Arms = Mapping[str, Sequence["ImportedRun"]]

IMPORTED = "imported"
"""``backend_mode`` of runs whose arithmetic and timing are known only from a log."""
PRECISION = {f"lowest_numerical_precision_in_{part}": part for part in ("linear", "attn", "comm")}
"""The settings that make the recipe, by MLPerf's keys: of linear layers, attention and communication."""


@dataclass(frozen=True, kw_only=True)
class ImportedRun:
    """One run of a log.

    ``evals`` are (tokens, validation loss), by rising tokens; ``in_bf16`` the losses of a
    second evaluation in bf16, by tokens; ``throughput`` (tokens, tokens per second). ``settings`` must be
    equal for runs to be comparable: batch, learning rate, data, hardware; never the seed, which is None if
    the log lacks it. ``source`` names the run in messages; ``content`` is hashed to its id. ``piece``: the
    run's name and seed, which no other file may hold; None if the log is known to be whole. ``notes``: what
    of the log was passed over or replaced.
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
    notes: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """The run's name in the run store: 16 hexadecimal digits."""
        return hashlib.sha256(self.content).hexdigest()[:16]

    @property
    def begins(self) -> int:
        """Tokens of the first evaluation, 0 without one."""
        return self.evals[0][0] if self.evals else 0

    @property
    def tokens(self) -> int:
        """Tokens of the last evaluation, 0 without one."""
        return self.evals[-1][0] if self.evals else 0


def run_of_losses(
    losses: Mapping[int, float],
    identity: Sequence[Any],
    *,
    diverged: str | None = None,
    state: State = "finished",
    **fields: Any,
) -> ImportedRun:
    """Make a run from its losses by tokens; a finished run has diverged if a loss is not finite.

    ``identity``: hashed to the run's id, together with the losses. ``diverged``: why it has diverged, where
    its log tells. ``fields``: other fields of the run.
    """
    finite = sorted((tokens, loss) for tokens, loss in losses.items() if math.isfinite(loss))
    if len(finite) < len(losses):
        diverged = "a loss that is not finite"
    return ImportedRun(
        content=json.dumps([*identity, finite]).encode(),
        evals=tuple(finite),
        state="diverged" if diverged and state == "finished" else state,
        message=diverged,
        **fields,
    )


def tidied(arms: Arms, waived: Sequence[str]) -> tuple[Arms, list[str]]:
    """Check that each run is whole, and number seeds that are text; also return a line that says so.

    Raises:
        UserError: two files hold one run, or a run without name and seed begins late.
    """
    for arm, runs in arms.items():
        known: dict[object, ImportedRun] = {}
        for run in sorted(runs, key=lambda run: run.begins):
            named = run.piece not in (None, ("", None))
            first = known.setdefault(run.piece if named else id(run), run)
            if run.id != first.id:
                raise UserError(
                    f"{first.source} and {run.source} (arm '{arm}') are of one run by their name or seed "
                    "(put a run that was resumed into one file; two runs have two names: --columns run=NAME)"
                )
            whole = next(iter(known.values()))
            steps = [after - at for (at, _), (after, _) in itertools.pairwise(run.evals[:2])]
            late = steps and run.begins > whole.begins + 2 * steps[0]
            if late and run.piece == ("", None) and "beginning" not in waived:
                raise UserError(
                    f"{run.source} begins at {run.begins:,} tokens, {whole.source} of arm '{arm}' at "
                    f"{whole.begins:,}: is it the rest of a resumed run? (put a run into one file, or name "
                    "its run or seed; if they are runs of their own: --waive beginning)"
                )
    alike: dict[str, list[str]] = {}
    for arm in arms:
        alike.setdefault(arm.casefold(), []).append(arm)
    said = [
        f"arms {' and '.join(names)} differ in case alone: taken as several"
        for names in alike.values()
        if len(names) > 1
    ]
    every = [run.seed for runs in arms.values() for run in runs]
    free = (number for number in itertools.count() if number not in every)
    texts = sorted({seed for seed in every if isinstance(seed, str)})
    numbers: dict[int | str | None, int] = dict(zip(texts, free, strict=False))
    numbered = {
        arm: [replace(run, seed=numbers.get(run.seed, run.seed)) for run in runs]
        for arm, runs in arms.items()
    }
    told = ", ".join(f"'{text}' = {number}" for text, number in numbers.items())
    return numbered, said + [f"seeds {told}"] * bool(numbers)


def write_study(
    folder: Path,
    arms: Arms,
    *,
    baseline: str,
    target: Target | None,
    paired_seeds: bool = False,
    description: str | None = None,
    waived: Sequence[str] = (),
    loss_unit: LoggedUnit = "nats",
) -> tuple[StudyStore, list[str]]:
    """Write an ordinary run store of a study named after its folder; also return a line for each copy.

    ``target``: None compares final losses. ``loss_unit``: of the logs; perplexities are in ``arms`` as
    their logarithms.
    A second import of the same logs writes the same store; a study that was not imported is not replaced.

    Raises:
        UserError: an arm has no runs, the baseline is unknown, the runs of an arm are not comparable, a log
            is in two arms, the folder holds a study that was not imported, the logs lack seeds for pairs, or
            the target is a perplexity and the losses are not in nats per token.
    """
    copies: list[str] = []
    known: dict[str, tuple[str, ImportedRun]] = {}
    kept: dict[str, list[ImportedRun]] = {}
    for name, runs in arms.items():
        kept[name] = []
        for run in runs:
            if run.id not in known:
                known[run.id] = name, run
                kept[name].append(run)
                continue
            arm, first = known[run.id]
            if arm != name:
                raise UserError(f"{run.source} is in arm '{arm}' and in arm '{name}' (expected one)")
            # Counting a copy would make the intervals too narrow.
            copies.append(f"{run.source}: same content as {first.source} (arm '{name}'): counted once")
        if not kept[name]:
            raise UserError(f"arm '{name}' has no run that could be read")
    if baseline not in kept:
        raise UserError(f"--baseline: no arm '{baseline}' (arms: {', '.join(kept)})")
    if paired_seeds:
        _check_pairs(kept, baseline)
    settings = {name: _common_settings(name, runs, waived) for name, runs in kept.items()}
    longest = max(run.tokens for runs in kept.values() for run in runs)
    if target is not None and not longest:
        raise UserError(
            "--target: the logs hold final losses alone (no column 'tokens'): leave the option out to "
            "compare those, or see --columns"
        )
    unit = stored_unit(loss_unit)
    if target is not None:
        target.check_unit(unit)
    store = StudyStore(folder)
    if store.plan_path.exists():
        try:
            imported = store.plan().imported
        except UserError:
            imported = False
        if not imported:
            raise UserError(f"{store.path} holds a study that was not imported: choose another --study")
        shutil.rmtree(store.path / "runs", ignore_errors=True)
    base = settings[baseline]
    entries = []
    for name, runs in kept.items():
        taken = [run.seed for run in runs]
        free = (number for number in itertools.count() if number not in taken)
        seeded = [replace(run, seed=next(free) if run.seed is None else run.seed) for run in runs]
        own = settings[name]
        told = [f"{part} {own[key]}" for key, part in PRECISION.items() if own.get(key)]
        keys = dict.fromkeys((*base, *own))
        entries.append(
            LockedArm(
                name=name,
                recipe=f"as logged{': ' * bool(told)}{', '.join(told)}",
                tokens=max([_write_run(store, run, longest) for run in seeded]),
                differs={key: (base.get(key), own.get(key)) for key in keys if base.get(key) != own.get(key)},
                runs=tuple(LockedRun(id=run.id, seed=int(run.seed or 0)) for run in seeded),
            )
        )
    store.write_plan(
        LockedPlan(
            study=folder.name,
            description=description,
            baseline=baseline,
            target=target,
            paired_seeds=paired_seeds,
            training=base,
            arms=tuple(entries),
            imported=True,
            loss_unit=unit,
        )
    )
    return store, copies


def with_settings(arms: Arms, hardware: str | None, constant_from: int | None) -> Arms:
    """Add the user's settings to all runs.

    ``hardware``: such as ``8x NVIDIA H100``. ``constant_from``: tokens after which the learning rate was
    constant.

    Raises:
        UserError: a log has other hardware, or a schedule of its own.
    """

    def told(run: ImportedRun) -> ImportedRun:
        settings = dict(run.settings)
        if hardware is not None and settings.setdefault("hardware", hardware) != hardware:
            raise UserError(
                f"--hardware: {run.source} was trained on {settings['hardware']} (leave the option out)"
            )
        if constant_from is not None:
            if key := next((key for key in settings if "schedule" in key or "decay" in key), None):
                raise UserError(
                    f"--constant-from: {run.source} tells {key} {settings[key]} itself (leave the option out)"
                )
            settings |= {"schedule": "constant", "warmup_tokens": constant_from}
        return replace(run, settings=settings)

    return {name: [told(run) for run in runs] for name, runs in arms.items()}


def _check_pairs(arms: Arms, baseline: str) -> None:
    """Raise UserError if a run has no seed, two runs of an arm have the same one, or no arm has a pair."""
    for name, runs in arms.items():
        for run in runs:
            if run.seed is None:
                raise UserError(
                    f"--paired: {run.source} (arm '{name}') tells no seed, so it has no pair: name the "
                    "column or group that holds it (seed), or leave --paired out"
                )
        seed, count = Counter(run.seed for run in runs).most_common(1)[0]
        if count > 1:
            raise UserError(f"--paired: arm '{name}' has several runs of seed {seed} (leave --paired out)")
    seeds = {name: {run.seed for run in runs} for name, runs in arms.items()}
    own = seeds.pop(baseline)
    if seeds and own.isdisjoint(set().union(*seeds.values())):
        raise UserError(
            f"--paired: no arm has a seed of '{baseline}', so it pairs nothing (leave --paired out)"
        )


def _common_settings(arm: str, runs: Sequence[ImportedRun], waived: Sequence[str]) -> dict[str, Any]:
    """Return the settings that all runs share; raise UserError if they differ in one that is not waived."""
    common: dict[str, Any] = {}
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        values = [json.dumps(run.settings.get(key)) for run in runs]
        usual, count = Counter(values).most_common(1)[0]
        if count == len(runs):
            common[key] = runs[0].settings.get(key)
        elif key not in waived:
            odd, run = next(pair for pair in zip(values, runs, strict=True) if pair[0] != usual)
            raise UserError(
                f"arm '{arm}': its runs differ in {key} ({odd} in {run.source}, {usual} in most) and cannot "
                f"be pooled; make two arms of them, or --waive {key}"
            )
    return common


def machine(hardware: str) -> dict[str, Any]:
    """Split ``8x NVIDIA H100`` into the fields ``gpu`` and ``world_size`` of an environment.

    Raises:
        UserError: the text has another form.
    """
    count, _, name = hardware.partition("x ")
    if not (count.isdecimal() and int(count) and name.strip()):
        raise UserError(f"--hardware: expected NUMBERx NAME, such as '8x NVIDIA H100', got '{hardware}'")
    return {"gpu": name.strip(), "world_size": int(count)}


def _write_run(store: StudyStore, run: ImportedRun, longest: int) -> int:
    """Write one run and return its budget in tokens: its own tokens or, if it diverged, ``longest``."""
    target = store.run(run.id)
    budget = longest if run.state == "diverged" else run.tokens
    target.create({"training": {"tokens": budget, **run.settings}, "seed": run.seed, "source": run.source})
    devices = machine(run.settings["hardware"]) if "hardware" in run.settings else {}
    write_record(
        target.environment_path,
        {
            **run.environment,
            **devices,
            "backend": IMPORTED,
            "backend_mode": IMPORTED,
            "log_notes": run.notes,
        },
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
    # MLflow's rows take their times from here, so repeated imports must write the same.
    begun = run.started_unix or 0.0
    rows = enumerate(itertools.chain(training, evaluations))
    as_json = json.JSONEncoder(separators=(",", ":")).encode
    content = "".join(as_json({**row, "time_unix": begun + number}) + "\n" for number, row in rows)
    write_bytes_atomic(target.metrics_path, content.encode())
    target.write_status(
        Status(
            state=run.state, attempt=1, tokens=run.tokens, step=len(run.evals), message=run.message,
            started_unix=run.started_unix, ended_unix=run.ended_unix,
        )
    )  # fmt: skip
    return budget
