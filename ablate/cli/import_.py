"""``ablate import``: make a study of logs that others wrote."""

from __future__ import annotations

import re
from functools import partial, wraps
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from ablate.base.errors import UserError
from ablate.cli.common import AT_LEAST_1, storage_option

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ablate.reports.read.imported import ImportedRun
    from ablate.store.lock import Target

    Crossing = Literal["confirmed", "first_eval"]
    _Decorator = Callable[[Any], Any]
    _Found = tuple[Mapping[str, Sequence[ImportedRun]], list[str]]
    """Runs by arm, and a line for each fault."""

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


def _importer(name: str, *own_options: _Decorator) -> Callable[[Callable[..., _Found]], click.Command]:
    """Make a verb of a function that takes its own options and returns runs by arm, and faults."""
    options: list[_Decorator] = [
        *own_options,
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
        click.option(
            "--paired", "paired_seeds", is_flag=True,
            help="Equal seeds are pairs: the same data and weights.",
        ),
        click.option(
            "--waive", "waived", multiple=True,
            help="Pool the runs of an arm although they differ in this.",
        ),
        click.option("--description", help="Free text, shown in the report."),
        partial(storage_option, other_names=("--out",)),
    ]  # fmt: skip

    def make(read: Callable[..., _Found]) -> click.Command:
        function: Any = wraps(read)(partial(_import, read))
        for option in reversed(options):
            function = option(function)
        return command.command(name)(function)

    return make


def _import(
    read: Callable[..., _Found], study: str, baselines: tuple[str, ...], storage: Path, **options: Any
) -> None:
    """Read logs, write them as a study, and say what there is; exit code 1 if something was left out."""
    from ablate.reports.read.imported import ImportedStudy, write_study

    target, crossing = options.pop("target"), options.pop("crossing")
    shown = {key: options.pop(key) for key in ("paired_seeds", "waived", "description")}
    found, faults = read(**options)
    if not _NAME.fullmatch(study):
        raise UserError(f"--study: '{study}' is no folder name (letters, digits, '.', '_' and '-')")
    parsed = _target(target, crossing)
    if len(baselines) > 1:
        raise UserError(f"--baseline: {' and '.join(baselines)} (expected one arm: make a study for each)")
    for fault in faults:
        click.echo(fault, err=True)
    made = ImportedStudy(name=study, arms=found, baseline=baselines[0], target=parsed, **shown)
    try:
        store, left_out = write_study(made, storage / study)
    except OSError as error:
        raise UserError(f"cannot write to {storage}: {error.strerror or error}") from error
    for fault in left_out:
        click.echo(fault, err=True)
    for name, runs in found.items():
        click.echo(f"{name}: {len(runs)} runs, {sum(len(run.evals) for run in runs)} evaluations")
    click.echo(f"\nStudy: {store.path}\nNext:  ablate report {study} --storage {storage}")
    click.get_current_context().exit(1 if faults or left_out else 0)


def _arm_option(text: str, *, required: bool = True) -> _Decorator:
    return click.option("--arm", "arms", multiple=True, required=required, help=f"NAME={text}; repeat it.")


_tokens_per_step = click.option(
    "--tokens-per-step", type=float, default=1.0, help="Where the tokens column counts steps."
)
_of_tables: tuple[_Decorator, ...] = (
    click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path)),
    _arm_option("FILE or NAME=FOLDER, in place of FILES", required=False),
    click.option(
        "--columns", default="", help="Ours=theirs, e.g. tokens=step,val_loss=eval/loss,run=name,seed=seed."
    ),
    _tokens_per_step,
)


@_importer(
    "mllog",
    _arm_option("FILE or NAME=FOLDER"),
    click.option("--tokens-per-sample", type=AT_LEAST_1, help="Default: the log's max_sequence_length."),
)
def mllog(arms: tuple[str, ...], tokens_per_sample: int | None) -> _Found:
    """Read MLPerf training logs (:::MLLOG): every result*.txt or *.log in the folders given."""
    from ablate.reports.read.mllog import read_mllog

    found: dict[str, list[ImportedRun]] = {}
    faults: list[str] = []
    for name, path in _files_of(_named(arms), ("result*.txt", "*.log", "*.out")):
        run, wrong = read_mllog(path, tokens_per_sample=tokens_per_sample)
        faults += wrong
        found.setdefault(name, []).extend([run] if run else [])
    return found, faults


@_importer("csv", *_of_tables)
def csv_(**options: Any) -> _Found:
    """Read CSV files with one row an evaluation.

    FILES have a column `arm`, as the evaluations.csv of a report of ours has; or name each arm's by --arm.
    """
    from ablate.reports.read.tables import read_csv

    return _tables(read_csv, ("*.csv",), **options)


@_importer("jsonl", *_of_tables)
def jsonl(**options: Any) -> _Found:
    """Read files of JSON lines with one object an evaluation.

    FILES have a key `arm`; or name each arm's by --arm.
    """
    from ablate.reports.read.tables import read_jsonl

    return _tables(read_jsonl, ("*.jsonl", "*.json"), **options)


@_importer(
    "wandb-export",
    click.argument("file", type=click.Path(path_type=Path)),
    _arm_option("PATTERN on the runs' names"),
    click.option("--metric", help="Where the chart has several."),
    _tokens_per_step,
)
def wandb_export(file: Path, arms: tuple[str, ...], metric: str | None, tokens_per_step: float) -> _Found:
    """Read FILE, the CSV that a W&B chart exports: columns 'RUN - METRIC'."""
    from ablate.reports.read.tables import Columns, by_pattern, read_wandb_chart, runs_of

    rows, faults = read_wandb_chart(file, metric)
    found, wrong = runs_of(file, rows, Columns(names={}, tokens_per_unit=tokens_per_step))
    runs = found.get(None, [])
    names = [run.source.removeprefix(f"{file} (").removesuffix(")") for run in runs]
    sorted_runs, unsorted = by_pattern(runs, names, _named(arms))
    return sorted_runs, [*faults, *wrong, *unsorted]


@_importer(
    "mlflow",
    click.option("--tracking-uri", required=True, help="Server or store, e.g. http://mlflow:5000."),
    click.option("--experiment", required=True, help="Its name."),
    click.option(
        "--metric", default="val_loss", show_default=True, help="Validation loss in nats per token."
    ),
    click.option(
        "--arm", "arms", multiple=True, required=True, help="NAME=FILTER in MLflow's search syntax."
    ),
    _tokens_per_step,
)
def mlflow(tracking_uri: str, experiment: str, arms: tuple[str, ...], **options: Any) -> _Found:
    """Read the runs of an experiment on any MLflow tracking server."""
    from ablate.reports.read.tracking import read_mlflow

    return read_mlflow(tracking_uri, experiment, arms=_named(arms), **options)


def _tables(
    read: Callable[[Path], Any],
    patterns: Sequence[str],
    *,
    files: tuple[Path, ...],
    arms: tuple[str, ...],
    columns: str,
    tokens_per_step: float,
) -> _Found:
    from ablate.reports.read.tables import NEEDED, OPTIONAL, Columns, runs_of

    if bool(files) == bool(arms):
        raise UserError("expected FILES with a column of arms, or --arm NAME=FILE for each arm")
    names = _pairs(columns.split(","), "--columns", "tokens=step") if columns else {}
    known = (*NEEDED, *OPTIONAL)
    for name in names:
        if name not in known:
            raise UserError(f"--columns: no column of ours is '{name}' (expected {', '.join(known)})")
    mapping = Columns(names=names, tokens_per_unit=tokens_per_step)
    found: dict[str, list[ImportedRun]] = {name: [] for name in _named(arms)}
    faults: list[str] = []
    asked: Iterator[tuple[str | None, Path]]
    asked = chain(_files_of(_named(arms), patterns), ((None, path) for path in files))
    for wanted, path in asked:
        rows, wrong = read(path)
        runs, more = runs_of(path, rows, mapping)
        faults += [*wrong, *more]
        for arm, own in runs.items():
            to = wanted or arm
            if to is None:
                column = mapping.of("arm")
                raise UserError(f"{path}: no column '{column}' (see --columns, or use --arm NAME=FILE)")
            if to == arm or "arm" not in names:
                found.setdefault(to, []).extend(own)
    return found, faults


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


def _files_of(arms: Mapping[str, str], patterns: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield each arm's file, or the files of its folder in order: of the first pattern that finds any."""
    for arm, where in ((arm, Path(text)) for arm, text in arms.items()):
        if where.is_file():
            yield arm, where
            continue
        if not where.exists():
            raise UserError(f"--arm {arm}: {where} does not exist")
        found = next(filter(None, (sorted(where.glob(pattern)) for pattern in patterns)), None)
        if found is None:
            raise UserError(f"--arm {arm}: nothing like {' or '.join(patterns)} in {where}")
        yield from ((arm, path) for path in found)


def _target(text: str, crossing: Crossing) -> Target:
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
