"""``ablate import``: make a study of logs that others wrote."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from fnmatch import fnmatchcase
from glob import glob
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import click

from ablate.base.command_hints import command_line
from ablate.base.errors import UserError, safe_text
from ablate.cli.common import AT_LEAST_1, PATH, echo_lines, refuse_other_options, storage_option, target_of
from ablate.run.log_formats import FORMATS
from ablate.run.loss_units import UNIT_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ablate.reports.read.imported import ImportedRun
    from ablate.reports.read.tables import Reading, Stages
    from ablate.run.log_rows import LogSource
    from ablate.run.loss_units import LoggedUnit

    StepSizes = dict[str, Stages]
    """The tokens of a step by arm; '' of every other."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_READING = {"sizes", "tokens_per_sample", "set_name", "loss_unit", "evaluations"}
_OWN_OPTIONS = {
    **dict.fromkeys(FORMATS, _READING),
    "mllog": {"tokens_per_sample"},
    "tensorboard": _READING | {"columns"},
    "text": _READING | {"patterns"},
    "csv": _READING | {"columns"},
    "jsonl": _READING | {"columns"},
    "wandb-export": {"metric", "sizes", "loss_unit", "evaluations"},
    "mlflow": {"metric", "sizes", "loss_unit", "tracking_uri", "experiment"},
}
_TABLES = ("csv", "jsonl")
_FILES = {
    **{name: form.files for name, form in FORMATS.items()},
    "text": ("*.txt", "*.log", "*.out"),
    "csv": ("*.csv",),
    "jsonl": ("*.jsonl", "*.json"),
    "wandb-export": ("*.csv",),
}
_FORMAT_LINES = "\n".join(f"    {name:<13} {form.about}" for name, form in FORMATS.items())
_LINE = r"step:(?P<step>\d+)/\d+ val_loss:(?P<val_loss>\S+) train_time:(?P<ms>\d+)ms"
_EXAMPLES = f"""\b
Examples:
  ablate import mllog --study fp4-vs-fp8 --arm NVFP4=logs/nvidia --arm FP8=logs/dell \\
      --baseline FP8 --target val_loss=3.3
  ablate import csv --study mine --arm fp8=fp8.csv --arm fp4=fp4.csv --baseline fp8 \\
      --target perplexity=20 --columns tokens=step,val_loss=eval/loss --tokens-per-step 524288
  ablate import csv evaluations.csv --study theirs --baseline bf16 --target val_loss=1.8 --paired
  ablate import megatron --study m --arm bf16=logs/bf16 --arm fp4=logs/fp4 --baseline bf16 \\
      --target val_loss=2.5 --tokens-per-sample 8192
  ablate import text --study nano --arm old=logs/old --arm new=logs/new --arm new=more/new \\
      --pattern '{_LINE}' \\
      --tokens-per-step 393216 --baseline old --target val_loss=3.3 --hardware '8x NVIDIA H100'
  ablate import csv final.csv --study ends --baseline bf16
  ablate import wandb-export chart.csv --study w --arm fp8='fp8-*' --arm fp4='fp4-*' --baseline fp8
  ablate import mlflow --tracking-uri http://mlflow:5000 --experiment NAME --study m \\
      --arm "fp8=tags.recipe = 'fp8'" --arm "fp4=tags.recipe = 'fp4'" --baseline fp8
"""


def _step_sizes(_context: click.Context, _option: click.Parameter, texts: Sequence[str]) -> StepSizes:
    """Read ``524288``, ``0:65536,1000:131072`` (from which step on), or ``ARM=`` and one of these."""
    found: StepSizes = {}
    for text in texts:
        arm, _, value = text.rpartition("=")
        parts = (value if ":" in value else f"0:{value}").split(",")
        try:
            stages = tuple((float(start), float(tokens)) for start, tokens in (p.split(":") for p in parts))
        except ValueError:
            stages = ()
        starts = [start for start, _ in stages]
        rising = starts[:1] == [0] and all(one < other < inf for one, other in pairwise(starts))
        if not rising or not all(0 < tokens < inf for _, tokens in stages):
            expected = "a number, or stages from step 0 on such as 0:65536,1000:131072"
            raise UserError(f"--tokens-per-step: expected {expected}, got '{text}'")
        if arm in found:
            raise UserError(f"--tokens-per-step: '{text}' is a second one for {arm or 'every arm'}")
        found[arm] = stages
    return found


@click.command("import", no_args_is_help=True, epilog=_EXAMPLES)
@click.argument("kind", metavar="FORMAT", type=click.Choice(list(_OWN_OPTIONS)))
@click.argument("files", nargs=-1, type=PATH)
@click.option(
    "--arm",
    "arms",
    multiple=True,
    help="NAME=FILE, NAME=FOLDER or NAME='GLOB'; of wandb-export a pattern on the runs' names, of mlflow a "
    "filter in MLflow's search syntax. Repeat it.",
)
@click.option("--study", required=True, help="Name of the study that is made.")
@click.option(
    "--baseline", "baselines", multiple=True, required=True, help="The arm that costs are stated against."
)
@click.option(
    "--target",
    help="val_loss=3.3 (in the unit of the losses) or perplexity=27.1. Default: final losses are compared.",
)
@click.option(
    "--crossing",
    type=click.Choice(["confirmed", "first_eval"]),
    default="confirmed",
    show_default=True,
    help="How tokens to target are read.",
)
@click.option(
    "--paired", "paired_seeds", is_flag=True, help="Equal seeds are pairs: the same data and weights."
)
@click.option(
    "--waive", "waived", multiple=True, help="Pool the runs of an arm although they differ in this."
)
@click.option(
    "--constant-from",
    type=click.IntRange(min=0),
    metavar="TOKENS",
    help="The learning rate is constant from these tokens on in all runs, which no log tells: T is then read "
    "off a local fit.",
)
@click.option(
    "--hardware",
    metavar="'8x NVIDIA H100'",
    help="What all runs were trained on, where no log tells: for the speed-up as logged.",
)
@click.option("--description", help="Free text, shown in the report.")
@storage_option
@click.option(
    "--tokens-per-step",
    "sizes",
    multiple=True,
    callback=_step_sizes,
    metavar="[ARM=]NUMBER|STAGES",
    help="The tokens of a step where steps are counted, or of a unit, such as 1e9 for billions. Stages: "
    "0:65536,1000:131072 for 131,072 tokens from step 1,000 on. Repeat it for an arm of other steps.",
)
@click.option(
    "--columns",
    default="",
    help="csv, jsonl, tensorboard: ours=theirs, as tokens=step,val_loss=eval/loss,run=name,seed=seed,"
    "seconds=time (or ms=…).",
)
@click.option(
    "--pattern",
    "patterns",
    multiple=True,
    help="text: a regular expression with named groups: val_loss, and step, samples or tokens (without, a "
    "file's last loss is its final one); loss (of training), set, run, seed; seconds or ms since training "
    "began. Several may share them. A loss is best taken as \\S+, so that nan is read as a divergence.",
)
@click.option(
    "--tokens-per-sample",
    type=AT_LEAST_1,
    help="The tokens of a sample, where a log counts samples. mllog: default: as the log or the benchmark "
    "says.",
)
@click.option("--set", "set_name", metavar="NAME", help="The evaluation set that counts, of several.")
@click.option(
    "--loss-unit",
    type=click.Choice([*UNIT_NAMES, "perplexity"]),
    help="The unit of the losses. Default: the trainer's, else nats.",
)
@click.option(
    "--evaluations",
    type=click.Choice(["rows", "changes"]),
    help="Which rows with a loss are evaluations: all, or those on which it changes, because the trainer "
    "repeats the last one. Default: as their distances tell.",
)
@click.option("--metric", help="wandb-export, where the chart has several; mlflow (default: val_loss).")
@click.option("--tracking-uri", help="mlflow: server or store, e.g. http://mlflow:5000.")
@click.option("--experiment", help="mlflow: its name.")
@click.pass_context
def command(
    context: click.Context,
    /,
    kind: str,
    study: str,
    baselines: tuple[str, ...],
    storage: Path,
    target: str | None,
    crossing: Literal["confirmed", "first_eval"],
    arms: tuple[str, ...],
    files: tuple[Path, ...],
    **options: Any,
) -> None:
    """Make a study of logs that others wrote; its help is below, because it lists the formats."""
    from ablate.reports.read.imported import machine, tidied, with_settings, write_study
    from ablate.reports.read.tables import seeds_by_names
    from ablate.run.evaluations import notes_of
    from ablate.store import StudyStore

    own = {name: options.pop(name) for name in set().union(*_OWN_OPTIONS.values())}
    refuse_other_options(context, {*context.params} - {*own} | _OWN_OPTIONS[kind], kind)
    hardware, constant_from = options.pop("hardware"), options.pop("constant_from")
    if hardware is not None:
        machine(hardware)
    if not _NAME.fullmatch(study):
        raise UserError(f"--study: '{study}' is no folder name (letters, digits, '.', '_' and '-')")
    if target is None and crossing != "confirmed":
        raise UserError("--crossing: there is no --target to cross (give one, or leave it out)")
    parsed = None if target is None else replace(target_of(target), crossing=crossing)
    if len(baselines) > 1:
        raise UserError(f"--baseline: {' and '.join(baselines)} (expected one arm: make a study for each)")
    faults: list[str] = []
    # Names go into every file of a report: they must not control a terminal or a page.
    named: dict[str, list[ImportedRun]] = defaultdict(list)
    for name, runs in _read(kind, files, arms, faults, own).items():
        named[safe_text(name)].extend(runs)
    for fault in dict.fromkeys(faults):
        click.echo(safe_text(fault), err=True)
    seeded, told = seeds_by_names(named)
    found, done = tidied(seeded, options["waived"])
    echo_lines(told + done)
    StudyStore(storage / study).refuse_unsafe()
    try:
        found = with_settings(found, hardware, constant_from)
        store, left_out = write_study(
            storage / study,
            found,
            baseline=safe_text(baselines[0]),
            target=parsed,
            loss_unit=_loss_unit(kind, own),
            **options,
        )
    except OSError as error:
        raise UserError(f"cannot write to {storage}: {error.strerror or error}") from error
    for fault in left_out:
        click.echo(safe_text(fault), err=True)
    for name, runs in found.items():
        click.echo(f"{name}: {len(runs)} runs, {sum(len(run.evals) for run in runs)} evaluations")
        echo_lines([f"  {note}" for note in notes_of({run.source: run.notes for run in runs})])
    click.echo(f"\nStudy: {store.path}\nNext:  {command_line('report', study, storage=storage)}")
    context.exit(1 if faults or left_out else 0)


command.help = f"""Make a study of logs that others wrote, so that `ablate report` and MLflow work on it.

    \b
    text          plain text, read by patterns; each file is a run
    csv, jsonl    one row an evaluation; or, without a column of tokens, a final loss a row. FILES have a
                  column `arm`, as the evaluations.csv of a report has; or name each arm's by --arm
    wandb-export  FILES is the CSV that a W&B chart exports: columns 'RUN - METRIC'
    mlflow        the runs of an experiment on any MLflow server
{_FORMAT_LINES}

    What does not parse is named by file and line, the rest goes on, and the exit code is then 1. Folders are
    searched with all that is in them. Without --target the arms are compared by their final losses.
    """


def _loss_unit(kind: str, own: Mapping[str, Any]) -> LoggedUnit:
    """Return the unit of the losses: as the user says, else the format's."""
    if own["loss_unit"] is not None:
        return cast("LoggedUnit", own["loss_unit"])
    return FORMATS[kind].unit if kind in FORMATS else "nats"


def _read(
    kind: str, files: Sequence[Path], arms: Sequence[str], faults: list[str], own: Mapping[str, Any]
) -> Mapping[str, Sequence[ImportedRun]]:
    """Read runs by arm; each fault adds a line to ``faults``. ``own``: the options that some kinds take."""
    if kind in _TABLES and bool(files) == bool(arms):
        raise UserError("expected FILES with a column of arms, or --arm NAME=FILE for each arm")
    if kind not in _TABLES and not (arms and bool(files) == (kind == "wandb-export")):
        what = "the chart's file and " if kind == "wandb-export" else ""
        raise UserError(f"{kind}: expected {what}--arm NAME=… for each arm")
    sizes: StepSizes = own["sizes"]
    places: dict[str, list[str]] = defaultdict(list)
    for name, value in _pairs(arms, "--arm", "FP8=logs/fp8"):
        places[name].append(value)
    for name in sizes:
        if name and name not in places:
            raise UserError(f"--tokens-per-step: no --arm {name}=… is given")
    stages = {arm: sizes.get(arm, sizes.get("")) for arm in ("", *places)}
    if kind == "mlflow":
        return _read_mlflow(places, stages, faults, own)
    if kind == "wandb-export":
        return _read_charts(files, places, stages, faults, own)
    return _read_files(kind, files, places, stages, faults, own)


def _read_mlflow(
    places: Mapping[str, Sequence[str]],
    stages: Mapping[str, Stages | None],
    faults: list[str],
    own: Mapping[str, Any],
) -> Mapping[str, Sequence[ImportedRun]]:
    from ablate.reports.read.tracking import read_mlflow

    uri = own["tracking_uri"]
    experiment = own["experiment"]
    if not uri or not experiment:
        raise UserError("mlflow: expected --tracking-uri and --experiment")
    metric = own["metric"] or "val_loss"
    return read_mlflow(uri, experiment, faults, metric=metric, arms=places, stages=stages)


def _read_charts(
    files: Sequence[Path],
    places: Mapping[str, Sequence[str]],
    stages: Mapping[str, Stages | None],
    faults: list[str],
    own: Mapping[str, Any],
) -> Mapping[str, Sequence[ImportedRun]]:
    from ablate.reports.read import tables

    if len(set(stages.values())) > 1:
        raise UserError("--tokens-per-step: a chart has one axis of steps for all arms (leave ARM= out)")
    reading = _reading("wandb-export", own, stages[""], {})
    runs: list[ImportedRun] = []
    for path in _listed(files, "FILES", "wandb-export"):
        rows = tables.read_wandb_chart(path, faults, own["metric"])
        try:
            runs += tables.runs_of_table(path, rows, faults, reading).get(None, [])
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    return tables.by_pattern(runs, places, faults)


def _reading(kind: str, own: Mapping[str, Any], stages: Stages | None, names: Mapping[str, str]) -> Reading:
    from ablate.reports.read.tables import Reading

    return Reading(
        names=names,
        stages=stages,
        sample_tokens=own["tokens_per_sample"],
        set_name=own["set_name"],
        loss_unit=_loss_unit(kind, own),
        evaluations=own["evaluations"],
        is_repeated=kind in FORMATS and FORMATS[kind].repeats,
    )


def _read_files(
    kind: str,
    files: Sequence[Path],
    places: Mapping[str, Sequence[str]],
    stages: Mapping[str, Stages | None],
    faults: list[str],
    own: Mapping[str, Any],
) -> Mapping[str, Sequence[ImportedRun]]:
    from ablate.reports.read import tables
    from ablate.reports.read.mllog import read_mllog

    names = _columns_named(own["columns"])
    source = None if kind in (*_TABLES, "mllog") else _source(kind, own, names)

    def read_file(path: Path, stages: Stages | None) -> Mapping[str | None, Sequence[ImportedRun]]:
        if kind == "mllog":
            run = read_mllog(path, faults, tokens_per_sample=own["tokens_per_sample"])
            return {None: [run] if run else []}
        reading = _reading(kind, own, stages, names)
        if source is not None:
            return tables.runs_of_log(path, source, faults, reading)
        read_rows = tables.read_csv if kind == "csv" else tables.read_jsonl
        return tables.runs_of_table(path, read_rows(path, faults), faults, reading)

    runs_by_arm: dict[str, list[ImportedRun]] = {name: [] for name in places}
    wanted: list[tuple[str | None, Path]] = []
    for name, texts in places.items():
        wanted += [(name, path) for path in _listed(map(Path, texts), f"--arm {name}", kind)]
    wanted += [(None, path) for path in _listed(files, "FILES", kind)]
    for arm_of_file, path in wanted:
        try:
            by_arm = read_file(path, stages[arm_of_file or ""])
        except (OSError, EOFError) as error:
            faults.append(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}")
            continue
        for arm, runs in by_arm.items():
            in_arm = arm_of_file or arm
            if in_arm is None:
                column = names.get("arm", "arm")
                raise UserError(f"{path}: no column '{column}' (see --columns, or use --arm NAME=FILE)")
            if in_arm == arm or "arm" not in names:
                runs_by_arm.setdefault(in_arm, []).extend(runs)
    return runs_by_arm


def _source(kind: str, own: Mapping[str, Any], names: Mapping[str, str]) -> LogSource:
    """Return how files of a kind are read.

    Raises:
        UserError: a pattern that cannot work.
    """
    from pydantic import ValidationError

    from ablate.run.log_rows import LogSource

    patterns = own["patterns"]
    if kind == "text" and not patterns:
        raise UserError("text: expected --pattern")
    if kind == "tensorboard" and names:
        return LogSource(tensorboard=dict(names), file="", set=own["set_name"])
    try:
        if kind == "text":
            return LogSource(patterns=list(patterns), set=own["set_name"])
        return LogSource(preset=kind, file="", set=own["set_name"])
    except ValidationError as error:
        fault = error.errors()[0].get("ctx", {})
        raise UserError(f"--pattern: {fault.get('what', error)}", hint=fault.get("hint")) from None


def _columns_named(text: str) -> dict[str, str]:
    """Read ``--columns``: the name of a column in the file, by our own name."""
    from ablate.reports.read.tables import COLUMNS

    names: dict[str, str] = {}
    for name, column in _pairs(filter(None, text.split(",")), "--columns", "tokens=step"):
        if name in names:
            raise UserError(f"--columns: '{name}' is given twice")
        if name not in COLUMNS:
            raise UserError(f"--columns: no column of ours is '{name}' (expected {', '.join(COLUMNS)})")
        names[name] = column
    return names


def _pairs(parts: Iterable[str], option: str, example: str) -> Iterator[tuple[str, str]]:
    for part in parts:
        name, equals, value = part.partition("=")
        if not (name.strip() and equals and value.strip()):
            raise UserError(f"{option}: expected NAME=VALUE, got '{part}' (such as {example})")
        yield name.strip(), value.strip()


def _listed(places: Iterable[Path], option: str, kind: str) -> Iterator[Path]:
    """Yield each file that places name, once: files, folders, and shell patterns of both."""
    found: dict[Path, None] = {}
    for place in places:
        matches = [place] if place.exists() else sorted(map(Path, glob(str(place), recursive=True)))  # noqa: PTH207
        if not matches:
            raise UserError(f"{option}: {place} does not exist")
        for one in matches:
            found |= dict.fromkeys([one] if one.is_file() else _found_in(one, option, _FILES[kind]))
    yield from found


def _found_in(where: Path, option: str, patterns: Sequence[str]) -> list[Path]:
    """Return all files of a folder, at any depth, that match the first pattern with a match.

    They are sorted. Hidden files are skipped. The number of files that are not read is printed.
    """
    everything = sorted(
        path
        for path in where.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(where).parts)
    )
    for pattern in patterns:
        if found := [path for path in everything if fnmatchcase(path.name, pattern)]:
            others = len(everything) - len(found)
            click.echo(f"{where}: {len(found)} files like {pattern}, {others} others not read")
            return found
    raise UserError(f"{option}: nothing like {' or '.join(patterns)} in {where} or its folders")
