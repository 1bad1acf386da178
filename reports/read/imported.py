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
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from ablate.run.loss_units import LoggedUnit
    from ablate.store import State
    from ablate.store.plan_file import Target

    Arms = Mapping[str, Sequence["ImportedRun"]]

IMPORTED = "imported"
"""``backend_mode`` of runs whose arithmetic and timing are known only from a log."""
PRECISION = {
    f"lowest_numerical_precision_in_{part}": part for part in ("linear", "attn", "comm")
}
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
    def name(self) -> str:
        """The run's name in its log; empty without one."""
        return self.piece[0] if self.piece else ""

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
    finite = [item for item in sorted(losses.items()) if math.isfinite(item[1])]
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
    """Check that each run is whole, and number seeds that are text; also return lines for the user.

    Raises:
        UserError: two files hold one run, or a run without name and seed begins late.
    """
    lines = []
    seeds: set[int | str | None] = set()
    spellings: dict[str, str] = {}
    for arm, runs in arms.items():
        _check_whole(arm, runs, waived)
        seeds |= {run.seed for run in runs}
        other = spellings.setdefault(arm.casefold(), arm)
        if other != arm:  # two that were meant as one would halve n without a word
            lines.append(f"arms {other} and {arm} differ in case alone: taken as two")
    texts = sorted(seed for seed in seeds if isinstance(seed, str))
    numbers: dict[object, int] = dict(zip(texts, _free_seeds(seeds), strict=False))
    if not numbers:
        return arms, lines
    numbered = {}
    for arm, runs in arms.items():
        numbered[arm] = [
            replace(run, seed=numbers[run.seed]) if run.seed in numbers else run
            for run in runs
        ]
    listed = ", ".join(f"'{text}' = {number}" for text, number in numbers.items())
    return numbered, [*lines, f"seeds {listed}"]


def _free_seeds(taken: Collection[object]) -> Iterator[int]:
    """Yield the numbers from 0 on that are not taken."""
    return (number for number in itertools.count() if number not in taken)


def _check_whole(arm: str, runs: Sequence[ImportedRun], waived: Sequence[str]) -> None:
    known: dict[object, ImportedRun] = {}
    by_beginning = sorted(runs, key=lambda run: run.begins)
    for run in by_beginning:
        if run.piece is None:
            continue
        if run.piece != ("", None):
            first = known.setdefault(run.piece, run)
            if run.id != first.id:
                raise UserError(
                    f"{first.source} and {run.source} (arm '{arm}') are of one run by their name or seed "
                    "(put a run that was resumed into one file; two runs have two names: --columns run=NAME)"
                )
        elif len(run.evals) > 1 and "beginning" not in waived:
            whole = by_beginning[0]
            interval = run.evals[1][0] - run.begins
            if run.begins > whole.begins + 2 * interval:
                raise UserError(
                    f"{run.source} begins at {run.begins:,} tokens, {whole.source} of arm '{arm}' at "
                    f"{whole.begins:,}: is it the rest of a resumed run? (put a run into one file, or name "
                    "its run or seed; if they are runs of their own: --waive beginning)"
                )


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
    arms, copies = _without_copies(arms)
    if baseline not in arms:
        raise UserError(f"--baseline: no arm '{baseline}' (arms: {', '.join(arms)})")
    if paired_seeds:
        _check_pairs(arms, baseline)
    settings = {}
    longest = 0
    for name, runs in arms.items():
        settings[name] = _common_settings(name, runs, waived)
        longest = max(longest, *(run.tokens for run in runs))
    unit = stored_unit(loss_unit)
    if target is not None:
        if not longest:
            raise UserError(
                "--target: the logs hold final losses alone (no column 'tokens'): leave the option out to "
                "compare those, or see --columns"
            )
        target.check_unit(unit)
    store = StudyStore(folder)
    _remove_runs(store)
    base = settings[baseline]
    locked = [
        _write_arm(store, name, runs, settings[name], base, longest)
        for name, runs in arms.items()
    ]
    store.write_plan(
        LockedPlan(
            study=folder.name,
            description=description,
            baseline=baseline,
            target=target,
            paired_seeds=paired_seeds,
            training=base,
            arms=tuple(locked),
            imported=True,
            loss_unit=unit,
        )
    )
    return store, copies


def _without_copies(arms: Arms) -> tuple[Arms, list[str]]:
    """Leave out runs that are in an arm twice, as counting a copy would make the intervals too narrow.

    Raises:
        UserError: a run is in two arms, or an arm has none.
    """
    kept_runs: dict[str, list[ImportedRun]] = {}
    lines: list[str] = []
    known: dict[str, tuple[str, ImportedRun]] = {}
    for name, runs in arms.items():
        if not runs:
            raise UserError(f"arm '{name}' has no run that could be read")
        kept_runs[name] = []
        for run in runs:
            if run.id not in known:
                known[run.id] = name, run
                kept_runs[name].append(run)
                continue
            arm, first = known[run.id]
            if arm != name:
                raise UserError(
                    f"{run.source} is in arm '{arm}' and in arm '{name}' (expected one)"
                )
            lines.append(
                f"{run.source}: same content as {first.source} (arm '{name}'): counted once"
            )
    return kept_runs, lines


def _remove_runs(store: StudyStore) -> None:
    """Remove the runs of an earlier import; raise UserError if the study was not imported."""
    if not store.plan_path.exists():
        return
    try:
        is_imported = store.plan().imported
    except UserError:
        is_imported = False
    if not is_imported:
        raise UserError(
            f"{store.path} holds a study that was not imported: choose another --study"
        )
    shutil.rmtree(store.path / "runs", ignore_errors=True)


def with_settings(arms: Arms, hardware: str | None, constant_from: int | None) -> Arms:
    """Add the user's settings to all runs.

    ``hardware``: such as ``8x NVIDIA H100``. ``constant_from``: tokens after which the learning rate was
    constant.

    Raises:
        UserError: a log has other hardware, or a schedule of its own.
    """
    changed: dict[str, list[ImportedRun]] = {}
    for arm, runs in arms.items():
        changed[arm] = []
        for run in runs:
            settings = dict(run.settings)
            if hardware is not None:
                logged = settings.setdefault("hardware", hardware)
                if logged != hardware:
                    raise UserError(
                        f"--hardware: {run.source} was trained on {logged} (leave the option out)"
                    )
            if constant_from is not None:
                for key, value in settings.items():
                    if "schedule" in key or "decay" in key:
                        raise UserError(
                            f"--constant-from: {run.source} tells {key} {value} itself (leave the option out)"
                        )
                settings |= {"schedule": "constant", "warmup_tokens": constant_from}
            changed[arm].append(replace(run, settings=settings))
    return changed


def schedule_hint(arms: Arms) -> list[str]:
    """Say what to type if the learning rate was constant; nothing if a log tells its schedule."""
    for run in itertools.chain(*arms.values()):
        if any("schedule" in key for key in run.settings):
            return []
    return [
        (
            "No log tells the learning rate's schedule, so crossings are interpolated: intervals are about a quarter "
            "wider. If the rate is constant from some token count on, add --constant-from TOKENS."
        )
    ]


def _check_pairs(arms: Arms, baseline: str) -> None:
    """Raise UserError if a run has no seed, two runs of an arm have the same one, or no arm has a pair."""
    seeds: dict[str, set[int | str]] = {}
    for name, runs in arms.items():
        seeds[name] = set()
        for run in runs:
            if run.seed is None:
                raise UserError(
                    f"--paired: {run.source} (arm '{name}') tells no seed, so it has no pair: name the "
                    "column or group that holds it (seed), or leave --paired out"
                )
            if run.seed in seeds[name]:
                raise UserError(
                    f"--paired: arm '{name}' has several runs of seed {run.seed} (leave --paired out)"
                )
            seeds[name].add(run.seed)
    seeds_of_baseline = seeds.pop(baseline)
    if seeds and seeds_of_baseline.isdisjoint(set().union(*seeds.values())):
        raise UserError(
            f"--paired: no arm has a seed of '{baseline}', so it pairs nothing (leave --paired out)"
        )


def _common_settings(
    arm: str, runs: Sequence[ImportedRun], waived: Sequence[str]
) -> dict[str, Any]:
    """Return the settings that all runs share; raise UserError if they differ in one that is not waived."""
    common: dict[str, Any] = {}
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        values = [json.dumps(run.settings.get(key)) for run in runs]
        most, count = Counter(values).most_common(1)[0]
        if count == len(runs):
            common[key] = runs[0].settings.get(key)
            continue
        if key in waived:
            continue
        for run, value in zip(runs, values, strict=True):
            if value != most:
                raise UserError(
                    f"arm '{arm}': its runs differ in {key} ({value} in {run.source}, {most} in most) and "
                    f"cannot be pooled; make two arms of them, or --waive {key}"
                )
    return common


def machine(hardware: str) -> dict[str, Any]:
    """Split ``8x NVIDIA H100`` into the fields ``gpu`` and ``world_size`` of an environment.

    Raises:
        UserError: the text has another form.
    """
    count, _, name = hardware.partition("x ")
    if not (count.isdecimal() and int(count) and name.strip()):
        raise UserError(
            f"--hardware: expected NUMBERx NAME, such as '8x NVIDIA H100', got '{hardware}'"
        )
    return {"gpu": name.strip(), "world_size": int(count)}


def _write_arm(
    store: StudyStore,
    name: str,
    runs: Sequence[ImportedRun],
    settings: dict[str, Any],
    base: dict[str, Any],
    longest: int,
) -> LockedArm:
    """Write the runs of an arm, and number those whose logs tell no seed.

    ``base``: the baseline's settings. ``longest``: the tokens of the study's longest run.
    """
    free = _free_seeds([run.seed for run in runs])
    locked = []
    tokens = []
    for run in runs:
        seed = next(free) if run.seed is None else run.seed
        tokens.append(_write_run(store, replace(run, seed=seed), longest))
        locked.append(LockedRun(id=run.id, seed=int(seed)))
    differs = {}
    for key in base | settings:
        pair = (base.get(key), settings.get(key))
        if pair[0] != pair[1]:
            differs[key] = pair
    precisions = [
        f"{part} {settings[key]}"
        for key, part in PRECISION.items()
        if settings.get(key)
    ]
    recipe = "as logged"
    if precisions:
        recipe += f": {', '.join(precisions)}"
    return LockedArm(
        name=name,
        recipe=recipe,
        tokens=max(tokens),
        differs=differs,
        runs=tuple(locked),
    )


def _write_run(store: StudyStore, run: ImportedRun, longest: int) -> int:
    """Write one run and return its budget in tokens: its own tokens or, if it diverged, ``longest``."""
    target = store.run(run.id)
    budget = longest if run.state == "diverged" else run.tokens
    target.create(
        {
            "training": {"tokens": budget, **run.settings},
            "seed": run.seed,
            "source": run.source,
        }
    )
    environment = dict(run.environment)
    if "hardware" in run.settings:
        environment |= machine(run.settings["hardware"])
    environment |= {
        "backend": IMPORTED,
        "backend_mode": IMPORTED,
        "log_notes": run.notes,
    }
    write_record(target.environment_path, environment)
    rows: list[dict[str, Any]] = []
    for step, (tokens, rate) in enumerate(run.throughput, 1):
        rows.append(
            {"kind": "train", "tokens": tokens, "step": step, "tokens_per_sec": rate}
        )
    for step, (tokens, loss) in enumerate(run.evals, 1):
        row = {"kind": "eval", "tokens": tokens, "step": step, "val_loss": loss}
        if tokens in run.in_bf16:
            row["val_loss_bf16"] = run.in_bf16[tokens]
        rows.append(row)
    # MLflow's rows take their times from here, so repeated imports must write the same.
    lines = ""
    for number, row in enumerate(rows):
        row["time_unix"] = (run.started_unix or 0.0) + number
        lines += json.dumps(row, separators=(",", ":")) + "\n"
    write_bytes_atomic(target.metrics_path, lines.encode())
    target.write_status(
        Status(
            state=run.state, attempt=1, tokens=run.tokens, step=len(run.evals), message=run.message,
            started_unix=run.started_unix, ended_unix=run.ended_unix,
        )
    )  # fmt: skip
    return budget
