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
from typing import TYPE_CHECKING, Any, Literal

import click

from ablate.base.command_hints import command_line
from ablate.base.errors import UserError, safe_text
from ablate.cli.common import (
    AT_LEAST_1,
    PATH,
    echo_lines,
    refuse_other_options,
    storage_option,
    target_of,
)
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
_FORMAT_LINES = "\n".join(
    f"    {name:<13} {form.about}" for name, form in FORMATS.items()
)
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


def _step_sizes(
    _context: click.Context, _option: click.Parameter, texts: Sequence[str]
) -> StepSizes:
    """Read ``524288``, ``0:65536,1000:131072`` (from which step on), or ``ARM=`` and one of these."""
    sizes: StepSizes = {}
    for text in texts:
        arm, _, value = text.rpartition("=")
        stages = _stages(value)
        if not stages:
            expected = "a number, or stages from step 0 on such as 0:65536,1000:131072"
            raise UserError(f"--tokens-per-step: expected {expected}, got '{text}'")
        if arm in sizes:
            raise UserError(
                f"--tokens-per-step: '{text}' is a second one for {arm or 'every arm'}"
            )
        sizes[arm] = stages
    return sizes


def _stages(text: str) -> Stages:
    """Read a number, or stages from step 0 on; empty if the text is neither."""
    if ":" not in text:
        text = f"0:{text}"
    stages = []
    for part in text.split(","):
        try:
            start, tokens = part.split(":")
            stages.append((float(start), float(tokens)))
        except ValueError:
            return ()
    starts = [start for start, _ in stages]
    is_rising = starts[0] == 0 and all(
        start < following < inf for start, following in pairwise(starts)
    )
    if not is_rising or not all(0 < tokens < inf for _, tokens in stages):
        return ()
    return tuple(stages)


@click.command("import", no_args_is_help=True, epilog=_EXAMPLES)
@click.argument("kind", metavar="FORMAT", type=click.Choice(list(_OWN_OPTIONS)))
@click.argument("files", nargs=-1, type=PATH)
@click.option(
    "--arm",
    "arms",
    multiple=True,
    help="NAME=FILE, NAME=FOLDER or NAME='GLOB'. wandb-export: NAME=PATTERN for the runs' names; mlflow: "
    "NAME=FILTER in MLflow's search syntax. May be repeated.",
)
@click.option("--study", required=True, help="Name of the new study.")
@click.option(
    "--baseline",
    "baselines",
    multiple=True,
    required=True,
    help="Arm against which costs are stated.",
)
@click.option(
    "--target",
    help="val_loss=3.3 (in the unit of the losses) or perplexity=27.1. Default: compare final losses.",
)
@click.option(
    "--crossing",
    type=click.Choice(["confirmed", "first_eval"]),
    default="confirmed",
    show_default=True,
    help="Which crossing of the target counts.",
)
@click.option(
    "--paired",
    "paired_seeds",
    is_flag=True,
    help="Treat equal seeds as pairs: the same data and weights.",
)
@click.option(
    "--waive",
    "waived",
    multiple=True,
    help="Pool the runs of an arm although they differ in this setting.",
)
@click.option(
    "--constant-from",
    type=click.IntRange(min=0),
    metavar="TOKENS",
    help="Say that the learning rate is constant from these tokens on in all runs, which no log tells: T is "
    "then read from a local fit.",
)
@click.option(
    "--hardware",
    metavar="'8x NVIDIA H100'",
    help="Hardware of all runs, where no log tells it: for the speed-up as logged.",
)
@click.option("--description", help="Free text for the report.")
@storage_option
@click.option(
    "--tokens-per-step",
    "sizes",
    multiple=True,
    callback=_step_sizes,
    metavar="[ARM=]NUMBER|STAGES",
    help="Tokens of a step where steps are counted, or of another unit, such as 1e9 for billions. The stages "
    "0:65536,1000:131072 mean 131,072 tokens from step 1,000 on. May be repeated for other arms.",
)
@click.option(
    "--columns",
    default="",
    help="csv, jsonl, tensorboard: names of columns, ours=theirs: tokens=step,val_loss=eval/loss,run=name,"
    "seed=seed,seconds=time (or ms=…).",
)
@click.option(
    "--pattern",
    "patterns",
    multiple=True,
    help="text: a regular expression with named groups: val_loss; step, samples or tokens (without one, the "
    "last loss of a file is its final loss); loss (of training), set, run, seed; seconds or ms since "
    "training began. Several patterns may share the groups. Write a loss as \\S+, so that nan is read as a "
    "divergence.",
)
@click.option(
    "--tokens-per-sample",
    type=AT_LEAST_1,
    help="Tokens of a sample, where a log counts samples. Default of mllog: what the log or the benchmark "
    "says.",
)
@click.option(
    "--set",
    "set_name",
    metavar="NAME",
    help="Evaluation set that counts, where a log has several.",
)
@click.option(
    "--loss-unit",
    type=click.Choice([*UNIT_NAMES, "perplexity"]),
    help="Unit of the losses. Default: the trainer's, else nats.",
)
@click.option(
    "--evaluations",
    type=click.Choice(["rows", "changes"]),
    help="Which rows with a loss are evaluations: all rows, or those on which the loss changes, because the "
    "trainer repeats the last one. Default: the distances of the rows tell.",
)
@click.option(
    "--metric",
    help="Metric to read: wandb-export, of several; mlflow (default: val_loss).",
)
@click.option(
    "--tracking-uri", help="mlflow: server or store, such as http://mlflow:5000."
)
@click.option("--experiment", help="mlflow: name of the experiment.")
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
    hardware: str | None,
    constant_from: int | None,
    **options: Any,
) -> int:
    """Make a study of logs that others wrote; its help is below, because it lists the formats."""
    from ablate.reports.read.imported import (
        machine,
        schedule_hint,
        tidied,
        with_settings,
        write_study,
    )
    from ablate.reports.read.tables import seeds_by_names
    from ablate.run.evaluations import notes_of
    from ablate.store import StudyStore

    of_formats = set().union(*_OWN_OPTIONS.values())
    refuse_other_options(
        context, {*context.params} - of_formats | _OWN_OPTIONS[kind], kind
    )
    if hardware is not None:
        machine(hardware)
    if not _NAME.fullmatch(study):
        raise UserError(
            f"--study: '{study}' is no folder name (letters, digits, '.', '_' and '-')"
        )
    if target is None and crossing != "confirmed":
        raise UserError(
            "--crossing: there is no --target to cross (give one, or leave it out)"
        )
    if target is None:
        parsed_target = None
    else:
        parsed_target = replace(target_of(target), crossing=crossing)
    if len(baselines) > 1:
        raise UserError(
            f"--baseline: {' and '.join(baselines)} (expected one arm: make a study for each)"
        )
    reader = _Reader(
        kind, files, arms, {name: options.pop(name) for name in of_formats}
    )
    # Names go into every file of a report: they must not control a terminal or a page.
    runs_by_arm: dict[str, list[ImportedRun]] = defaultdict(list)
    for name, runs in reader.read().items():
        runs_by_arm[safe_text(name)].extend(runs)
    for fault in dict.fromkeys(reader.faults):
        click.echo(safe_text(fault), err=True)
    seeded, seed_notes = seeds_by_names(runs_by_arm)
    tidy, tidy_notes = tidied(seeded, options["waived"])
    echo_lines(seed_notes + tidy_notes)
    StudyStore(storage / study).refuse_unsafe()
    try:
        imported = with_settings(tidy, hardware, constant_from)
        store, left_out = write_study(
            storage / study,
            imported,
            baseline=safe_text(baselines[0]),
            target=parsed_target,
            loss_unit=reader.loss_unit,
            **options,
        )
    except OSError as error:
        raise UserError(
            f"cannot write to {storage}: {error.strerror or error}"
        ) from error
    for fault in left_out:
        click.echo(safe_text(fault), err=True)
    for name, runs in imported.items():
        click.echo(
            f"{name}: {len(runs)} runs, {sum(len(run.evals) for run in runs)} evaluations"
        )
        echo_lines(
            [f"  {note}" for note in notes_of({run.source: run.notes for run in runs})]
        )
    if parsed_target is not None:
        echo_lines(schedule_hint(imported))
    click.echo(
        f"\nStudy: {store.path}\nNext:  {command_line('report', study, storage=storage)}"
    )
    return int(bool(reader.faults or left_out))


command.help = f"""Make a study of logs that others wrote, so that `ablate report` and MLflow work on it.

    \b
    text          plain text, read by patterns; each file is a run
    csv, jsonl    one row for each evaluation; or, without a column of tokens, one final loss in each row
    wandb-export  FILES is the CSV that a W&B chart exports: columns 'RUN - METRIC'
    mlflow        the runs of an experiment on any MLflow server
{_FORMAT_LINES}

    A line names the file and line of what cannot be read; the rest is imported, and the exit code is then 1.
    Folders are searched at any depth. FILES have a column `arm`, as the evaluations.csv of a report has, or lie in
    folders that name their arms, such as bf16-0/main.log, bf16/version_0/metrics.csv or bf16/seed=3.log; else
    --arm names the files. Without --target the final losses of the arms are compared.
    """


class _Reader:
    """Reads logs of one format, arm by arm.

    ``options``: those that only some formats take. ``faults``: gets a line for each fault of the logs.
    """

    def __init__(
        self,
        kind: str,
        files: Sequence[Path],
        arms: Sequence[str],
        options: Mapping[str, Any],
    ) -> None:
        if kind == "wandb-export" and not (files and arms):
            raise UserError(
                f"{kind}: expected the chart's file and --arm NAME=… for each arm"
            )
        if kind == "mlflow" and (files or not arms):
            raise UserError(f"{kind}: expected --arm NAME=… for each arm")
        if kind in _FILES and kind != "wandb-export" and bool(files) == bool(arms):
            raise UserError(
                f"{kind}: expected FILES, or --arm NAME=FILE for each arm (of FILES a column `arm` or the "
                "names of their folders are the arms)"
            )
        self.kind = kind
        self.files = files
        self.options = options
        self.faults: list[str] = []
        self.places: dict[str, list[str]] = defaultdict(list)  # of each arm
        for name, place in _pairs(arms, "--arm", "FP8=logs/fp8"):
            self.places[name].append(place)
        sizes: StepSizes = options["sizes"]
        for name in sizes:
            if name and name not in self.places:
                raise UserError(f"--tokens-per-step: no --arm {name}=… is given")
        self.stages = {arm: sizes.get(arm, sizes.get("")) for arm in ("", *self.places)}
        self.columns = _columns_named(options["columns"])
        self.loss_unit: LoggedUnit = "nats"
        if options["loss_unit"] is not None:
            self.loss_unit = options["loss_unit"]
        elif kind in FORMATS:
            self.loss_unit = FORMATS[kind].unit

    def read(self) -> Mapping[str, Sequence[ImportedRun]]:
        """Read the runs of each arm."""
        if self.kind == "mlflow":
            return self._read_mlflow()
        if self.kind == "wandb-export":
            return self._read_charts()
        return self._read_files()

    def _read_mlflow(self) -> Mapping[str, Sequence[ImportedRun]]:
        from ablate.reports.read.tracking import read_mlflow

        uri = self.options["tracking_uri"]
        experiment = self.options["experiment"]
        if not uri or not experiment:
            raise UserError("mlflow: expected --tracking-uri and --experiment")
        metric = self.options["metric"] or "val_loss"
        return read_mlflow(
            uri,
            experiment,
            self.faults,
            metric=metric,
            arms=self.places,
            stages=self.stages,
        )

    def _read_charts(self) -> Mapping[str, Sequence[ImportedRun]]:
        from ablate.reports.read import tables

        if len(set(self.stages.values())) > 1:
            raise UserError(
                "--tokens-per-step: a chart has one axis of steps for all arms (leave ARM= out)"
            )
        runs: list[ImportedRun] = []
        for path in self._listed(self.files, "FILES"):
            rows = tables.read_wandb_chart(path, self.faults, self.options["metric"])
            try:
                runs += tables.runs_of_table(
                    path, rows, self.faults, self._reading("")
                ).get(None, [])
            except OSError as error:
                raise UserError(
                    f"{path}: cannot be read: {error.strerror or error}"
                ) from None
        return tables.by_pattern(runs, self.places, self.faults)

    def _read_files(self) -> Mapping[str, Sequence[ImportedRun]]:
        from ablate.reports.read import tables

        source = None if self.kind in (*_TABLES, "mllog") else self._log_source()
        runs_by_arm: dict[str, list[ImportedRun]] = {name: [] for name in self.places}
        files: list[tuple[str, Path]] = []  # the arm that --arm names, and its file
        for name, places in self.places.items():
            files += [
                (name, path)
                for path in self._listed(map(Path, places), f"--arm {name}")
            ]
        arms_by_folders = tables.arms_by_folders(self._listed(self.files, "FILES"))
        files += [("", path) for path in arms_by_folders]
        for arm_of_file, path in files:
            try:
                by_arm = self._read_file(path, arm_of_file, source)
            except (OSError, EOFError) as error:
                self.faults.append(
                    f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"
                )
                continue
            for arm_of_row, runs in by_arm.items():
                arm = arm_of_file or arm_of_row or arms_by_folders[path]
                if not arm:
                    column = self.columns.get("arm", "arm")
                    raise UserError(
                        f"{path}: neither a column '{column}' nor a folder names its arm (--columns arm=…, or "
                        "--arm NAME=FILE)"
                    )
                if arm == arm_of_row or "arm" not in self.columns:
                    runs_by_arm.setdefault(arm, []).extend(runs)
        return runs_by_arm

    def _read_file(
        self, path: Path, arm: str, source: LogSource | None
    ) -> Mapping[str | None, Sequence[ImportedRun]]:
        """Read a file's runs by the arm that its rows name. ``source``: how a log is read; None: no log."""
        from ablate.reports.read import tables
        from ablate.reports.read.mllog import read_mllog

        if self.kind == "mllog":
            run = read_mllog(
                path, self.faults, tokens_per_sample=self.options["tokens_per_sample"]
            )
            return {None: [run] if run else []}
        reading = self._reading(arm)
        if source is not None:
            return tables.runs_of_log(path, source, self.faults, reading)
        read_rows = tables.read_csv if self.kind == "csv" else tables.read_jsonl
        return tables.runs_of_table(
            path, read_rows(path, self.faults), self.faults, reading
        )

    def _reading(self, arm: str) -> Reading:
        from ablate.reports.read.tables import Reading

        return Reading(
            names=self.columns,
            stages=self.stages[arm],
            sample_tokens=self.options["tokens_per_sample"],
            set_name=self.options["set_name"],
            loss_unit=self.loss_unit,
            evaluations=self.options["evaluations"],
            is_repeated=self.kind in FORMATS and FORMATS[self.kind].repeats,
        )

    def _log_source(self) -> LogSource:
        """Return how logs of this format are read.

        Raises:
            UserError: a pattern that cannot work.
        """
        from pydantic import ValidationError

        from ablate.run.log_rows import LogSource

        patterns = self.options["patterns"]
        set_name = self.options["set_name"]
        if self.kind == "text" and not patterns:
            raise UserError("text: expected --pattern")
        if self.kind == "tensorboard" and self.columns:
            return LogSource(tensorboard=self.columns, file="", set=set_name)
        try:
            if self.kind == "text":
                return LogSource(patterns=list(patterns), set=set_name)
            return LogSource(preset=self.kind, file="", set=set_name)
        except ValidationError as error:
            fault = error.errors()[0].get("ctx", {})
            raise UserError(
                f"--pattern: {fault.get('what', error)}", hint=fault.get("hint")
            ) from None

    def _listed(self, places: Iterable[Path], option: str) -> dict[Path, None]:
        """List each file that places name, once: files, folders, and shell patterns of both."""
        files: dict[Path, None] = {}
        for place in places:
            matches = [place]
            if not place.exists():
                matches = [
                    Path(match)
                    for match in sorted(glob(str(place), recursive=True))  # noqa: PTH207
                ]
            if not matches:
                raise UserError(f"{option}: {place} does not exist")
            for match in matches:
                if match.is_file():
                    files[match] = None
                else:
                    files |= dict.fromkeys(_files_in(match, option, _FILES[self.kind]))
        return files


def _columns_named(text: str) -> dict[str, str]:
    """Read ``--columns``: the name of a column in the file, by our own name."""
    from ablate.reports.read.tables import COLUMNS

    columns: dict[str, str] = {}
    for name, column in _pairs(
        filter(None, text.split(",")), "--columns", "tokens=step"
    ):
        if name in columns:
            raise UserError(f"--columns: '{name}' is given twice")
        if name not in COLUMNS:
            raise UserError(
                f"--columns: no column of ours is '{name}' (expected {', '.join(COLUMNS)})"
            )
        columns[name] = column
    return columns


def _pairs(
    parts: Iterable[str], option: str, example: str
) -> Iterator[tuple[str, str]]:
    for part in parts:
        name, equals, value = part.partition("=")
        if not (name.strip() and equals and value.strip()):
            raise UserError(
                f"{option}: expected NAME=VALUE, got '{part}' (such as {example})"
            )
        yield name.strip(), value.strip()


def _files_in(folder: Path, option: str, patterns: Sequence[str]) -> list[Path]:
    """Return all files of a folder, at any depth, that match the first pattern with a match.

    They are sorted. Hidden files are skipped. The number of files that are not read is printed.
    """
    everything = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    for pattern in patterns:
        matching = [path for path in everything if fnmatchcase(path.name, pattern)]
        if matching:
            num_others = len(everything) - len(matching)
            click.echo(
                f"{folder}: {len(matching)} files like {pattern}, {num_others} others not read"
            )
            return matching
    raise UserError(
        f"{option}: nothing like {' or '.join(patterns)} in {folder} or its folders"
    )
