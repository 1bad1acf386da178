"""``ablate import``: make a study of logs that others wrote."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from ablate.base.errors import UserError
from ablate.cli.common import storage_option

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ablate.reports.read.imported import ImportedRun
    from ablate.store.lock import Target

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@click.group("import", no_args_is_help=True)
def command() -> None:
    """Make a study of logs that others wrote, so that `ablate report` and MLflow work on it.

    What does not parse is named by file and line, the rest goes on, and the exit code is then 1.

    \b
    Examples:
      ablate import mllog --study fp4-vs-fp8 --arm NVFP4=logs/nvidia --arm FP8=logs/dell \\
          --baseline FP8 --target val_loss=3.3
      ablate import csv --study mine --arm fp8=fp8.csv --arm fp4=fp4.csv --baseline fp8 \\
          --target perplexity=20 --columns tokens=step,val_loss=eval/loss --tokens-per-step 524288
      ablate import csv evaluations.csv --study theirs --baseline bf16 --target val_loss=1.8 --paired
    """  # noqa: D301  \b is click's mark for a paragraph that keeps its line breaks


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What every importer asks for, as it was typed."""

    study: str
    baselines: tuple[str, ...]
    target: str
    crossing: Literal["confirmed", "first_eval"]
    paired: bool
    waive: tuple[str, ...]
    description: str | None
    storage: Path


def _common(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that every importer has; ``function`` gets them as ``asked``."""
    options: list[Callable[..., Any]] = [
        click.option("--study", required=True, help="Name of the study that is made."),
        click.option(
            "--baseline", "baselines", multiple=True, required=True,
            help="The arm that costs are stated against.",
        ),
        click.option("--target", required=True, help="val_loss=3.3 (nats per token) or perplexity=27.1."),
        click.option(
            "--crossing", type=click.Choice(["confirmed", "first_eval"]), default="confirmed",
            show_default=True, help="How tokens to target are read.",
        ),
        click.option("--paired", is_flag=True, help="Equal seeds are pairs: the same data and weights."),
        click.option("--waive", multiple=True, help="Pool the runs of an arm although they differ in this."),
        click.option("--description", help="Free text, shown in the report."),
        partial(storage_option, other_names=("--out",)),
    ]  # fmt: skip

    @wraps(function)
    def command(**values: Any) -> Any:
        asked = _Asked(**{field.name: values.pop(field.name) for field in fields(_Asked)})
        return function(**values, asked=asked)

    for option in reversed(options):
        command = option(command)
    return command


_arm = click.option(
    "--arm", "arms", multiple=True, required=True, help="NAME=FILE or NAME=FOLDER; repeat it."
)


@command.command("mllog")
@_arm
@click.option(
    "--tokens-per-sample", type=click.IntRange(min=1), help="Default: the log's max_sequence_length."
)
@_common
def mllog(arms: tuple[str, ...], tokens_per_sample: int | None, asked: _Asked) -> None:
    """Read MLPerf training logs (:::MLLOG): every result*.txt or *.log in the folders given."""
    from ablate.reports.read.mllog import read_mllog

    found: dict[str, list[ImportedRun]] = {}
    faults: list[str] = []
    for name, where in _named(arms).items():
        for path in _files(name, Path(where), ("result*.txt", "*.log", "*.out")):
            run, wrong = read_mllog(path, tokens_per_sample=tokens_per_sample)
            faults += wrong
            found.setdefault(name, []).extend([run] if run else [])
    _finish(found, faults, asked)


_columns = click.option(
    "--columns", default="", help="Ours=theirs, e.g. tokens=step,val_loss=eval/loss,run=name,seed=seed."
)
_tokens_per_step = click.option(
    "--tokens-per-step", type=float, default=1.0, help="Where the tokens column counts steps."
)


_files_of_arms = click.argument(
    "files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
_arm_or_files = click.option(
    "--arm", "arms", multiple=True, help="NAME=FILE or NAME=FOLDER, in place of FILES; repeat it."
)


@command.command("csv")
@_files_of_arms
@_arm_or_files
@_columns
@_tokens_per_step
@_common
def csv_(**options: Any) -> None:
    """Read CSV files with one row an evaluation.

    FILES have a column `arm`, as the evaluations.csv of a report of ours has; or name each arm's by --arm.
    """
    from ablate.reports.read.tables import read_csv

    _tables(read_csv, ("*.csv",), **options)


@command.command("jsonl")
@_files_of_arms
@_arm_or_files
@_columns
@_tokens_per_step
@_common
def jsonl(**options: Any) -> None:
    """Read files of JSON lines with one object an evaluation.

    FILES have a key `arm`; or name each arm's by --arm.
    """
    from ablate.reports.read.tables import read_jsonl

    _tables(read_jsonl, ("*.jsonl", "*.json"), **options)


@command.command("wandb-export")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--arm", "arms", multiple=True, required=True, help="NAME=PATTERN on the runs' names; repeat it."
)
@click.option("--metric", help="Where the chart has several.")
@_tokens_per_step
@_common
def wandb_export(
    file: Path, arms: tuple[str, ...], metric: str | None, tokens_per_step: float, asked: _Asked
) -> None:
    """Read FILE, the CSV that a W&B chart exports: columns 'RUN - METRIC'."""
    from ablate.reports.read.tables import Columns, by_pattern, read_wandb_chart, runs_of

    rows, faults = read_wandb_chart(file, metric)
    found, wrong = runs_of(file, rows, Columns(names={}, tokens_per_unit=tokens_per_step))
    runs = found.get(None, [])
    names = [run.source.removeprefix(f"{file} (").removesuffix(")") for run in runs]
    sorted_runs, unsorted = by_pattern(runs, names, _named(arms))
    _finish(sorted_runs, [*faults, *wrong, *unsorted], asked)


@command.command("mlflow")
@click.option("--tracking-uri", required=True, help="Server or store, e.g. http://mlflow:5000.")
@click.option("--experiment", required=True, help="Its name.")
@click.option("--metric", default="val_loss", show_default=True, help="Validation loss in nats per token.")
@click.option("--arm", "arms", multiple=True, required=True, help="NAME=FILTER in MLflow's search syntax.")
@_tokens_per_step
@_common
def mlflow(
    tracking_uri: str,
    experiment: str,
    metric: str,
    arms: tuple[str, ...],
    tokens_per_step: float,
    asked: _Asked,
) -> None:
    """Read the runs of an experiment on any MLflow tracking server."""
    from ablate.reports.read.tracking import read_mlflow

    found, faults = read_mlflow(
        tracking_uri, experiment, metric=metric, arms=_named(arms), tokens_per_step=tokens_per_step
    )
    _finish(found, faults, asked)


def _tables(
    read: Callable[[Path], Any],
    patterns: Sequence[str],
    *,
    files: tuple[Path, ...],
    arms: tuple[str, ...],
    columns: str,
    tokens_per_step: float,
    asked: _Asked,
) -> None:
    from ablate.reports.read.tables import NEEDED, OPTIONAL, Columns, runs_of

    if bool(files) == bool(arms):
        raise UserError("expected FILES with a column of arms, or --arm NAME=FILE for each arm")
    names = _pairs(columns.split(","), "--columns", "tokens=step") if columns else {}
    for name in names:
        if name not in (*NEEDED, *OPTIONAL):
            raise UserError(
                f"--columns: no column of ours is '{name}' (expected {', '.join((*NEEDED, *OPTIONAL))})"
            )
    mapping = Columns(names=names, tokens_per_unit=tokens_per_step)
    found: dict[str, list[ImportedRun]] = {name: [] for name in _named(arms)}
    faults: list[str] = []
    for name, where in _named(arms).items():
        for path in _files(name, Path(where), patterns):
            rows, wrong = read(path)
            runs, more = runs_of(path, rows, mapping)
            faults += [*wrong, *more]
            wanted = runs.get(name, []) if "arm" in names else [run for own in runs.values() for run in own]
            found[name] += wanted
    for path in files:
        rows, wrong = read(path)
        runs, more = runs_of(path, rows, mapping)
        faults += [*wrong, *more]
        for arm, own in runs.items():
            if arm is None:
                column = mapping.of("arm")
                raise UserError(f"{path}: no column '{column}' (see --columns, or use --arm NAME=FILE)")
            found.setdefault(arm, []).extend(own)
    _finish(found, faults, asked)


def _named(arms: Sequence[str]) -> dict[str, str]:
    return _pairs(arms, "--arm", "FP8=logs/fp8")


def _pairs(parts: Sequence[str], option: str, example: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if not (name.strip() and equals and value.strip()):
            raise UserError(f"{option}: expected NAME=VALUE, got '{part}' (such as {example})")
        if name.strip() in found:
            raise UserError(f"{option}: '{name.strip()}' is given twice")
        found[name.strip()] = value.strip()
    return found


def _files(arm: str, where: Path, patterns: Sequence[str]) -> list[Path]:
    """Return a file, or the files of a folder in order.

    Raises:
        UserError: nothing there.
    """
    if where.is_file():
        return [where]
    if not where.exists():
        raise UserError(f"--arm {arm}: {where} does not exist")
    for pattern in patterns:
        if found := sorted(where.glob(pattern)):
            return found
    raise UserError(f"--arm {arm}: nothing like {' or '.join(patterns)} in {where}")


def _target(text: str, crossing: Literal["confirmed", "first_eval"]) -> Target:
    from ablate.store.lock import Target

    kind, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if kind not in ("val_loss", "perplexity") or not 0 < number < float("inf"):
        raise UserError(f"--target: expected val_loss=NUMBER or perplexity=NUMBER, got '{text}'")
    if kind == "perplexity" and number <= 1:
        raise UserError(f"--target: a perplexity is above 1, got {number:g}")
    return Target(kind="val_loss" if kind == "val_loss" else "perplexity", value=number, crossing=crossing)


def _finish(found: Mapping[str, Sequence[ImportedRun]], faults: list[str], asked: _Asked) -> None:
    from ablate.reports.read.imported import ImportedStudy, write_study

    study, storage = asked.study, asked.storage
    if not _NAME.fullmatch(study):
        raise UserError(f"--study: '{study}' is no folder name (letters, digits, '.', '_' and '-')")
    target = _target(asked.target, asked.crossing)
    if len(asked.baselines) > 1:
        raise UserError(
            f"--baseline: {' and '.join(asked.baselines)} (expected one arm: make a study for each)"
        )
    for fault in faults:
        click.echo(fault, err=True)
    made = ImportedStudy(
        name=study,
        arms=found,
        baseline=asked.baselines[0],
        target=target,
        paired_seeds=asked.paired,
        description=asked.description,
        waived=asked.waive,
    )
    try:
        store, left_out = write_study(made, storage / study)
    except OSError as error:
        raise UserError(f"cannot write to {storage}: {error.strerror or error}") from error
    for fault in left_out:
        click.echo(fault, err=True)
    for name, runs in found.items():
        evaluations = sum(len(run.evals) for run in runs)
        click.echo(f"{name}: {len(runs)} runs, {evaluations} evaluations")
    click.echo(f"\nStudy: {store.path}\nNext:  ablate report {study} --storage {storage}")
    click.get_current_context().exit(1 if faults or left_out else 0)
