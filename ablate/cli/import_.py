"""``ablate import``: make a study of logs that others wrote."""

from __future__ import annotations

import re
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Any, Literal

import click

from ablate.base.command_hints import command_line
from ablate.base.errors import UserError, as_user_error, safe_text
from ablate.cli.common import (
    PATH,
    count_option,
    echo_lines,
    flag,
    refuse_other_options,
    storage_option,
    target_of,
)
from ablate.run.log_formats import FORMATS
from ablate.run.loss_units import UNIT_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ablate.reports.read.imported import ImportedRun
    from ablate.reports.read.tables import Stages

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


def _arm(text: str) -> tuple[str, str]:
    return _pair(text, "--arm", "FP8=logs/fp8")


def _columns(text: str) -> dict[str, str]:
    """Read the name of a column in the file, by our own name."""
    words = filter(None, text.split(","))
    pairs = (_pair(word, "--columns", "tokens=step") for word in words)
    return _each_once(pairs, "--columns")


def _pair(word: str, option: str, example: str) -> tuple[str, str]:
    name, _, value = map(str.strip, word.partition("="))
    if not name or not value:
        raise UserError(
            f"{option}: expected NAME=VALUE, got '{word}' (such as {example})"
        )
    return name, value


def _each_once(pairs: Iterable[tuple[str, Any]], option: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise UserError(f"{option}: {name or 'every arm'} is given twice")
        values[name] = value
    return values


def _step_size(text: str) -> tuple[str, Stages]:
    """Read ``524288``, ``0:65536,1000:131072`` (from which step on), or ``ARM=`` and one of these."""
    arm, _, value = text.rpartition("=")
    if ":" not in value:
        value = f"0:{value}"
    stages: Stages = ()
    with suppress(ValueError):
        parts = [part.split(":") for part in value.split(",")]
        stages = tuple((float(start), float(tokens)) for start, tokens in parts)
    starts = [start for start, _ in stages]
    is_rising = all(start < following < inf for start, following in pairwise(starts))
    are_sizes = all(0 < tokens < inf for _, tokens in stages)
    if starts[:1] != [0] or not is_rising or not are_sizes:
        expected = "a number, or stages from step 0 on such as 0:65536,1000:131072"
        raise UserError(f"--tokens-per-step: expected {expected}, got '{text}'")
    return arm, stages


@click.command("import", no_args_is_help=True, epilog=_EXAMPLES)
@click.argument("kind", metavar="FORMAT", type=click.Choice(list(_OWN_OPTIONS)))
@click.argument("files", nargs=-1, type=PATH)
@click.option(
    "--arm",
    "arms",
    metavar="NAME=LOGS",
    multiple=True,
    type=_arm,
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
    help="Which crossing of the target counts.",
)
@flag(
    "--paired",
    "paired_seeds",
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
    type=_step_size,
    metavar="[ARM=]NUMBER|STAGES",
    help="Tokens of a step where steps are counted, or of another unit, such as 1e9 for billions. The stages "
    "0:65536,1000:131072 mean 131,072 tokens from step 1,000 on. May be repeated for other arms.",
)
@click.option(
    "--columns",
    metavar="OURS=THEIRS,…",
    default="",
    show_default=False,
    type=_columns,
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
@count_option(
    "--tokens-per-sample",
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
    arms: tuple[tuple[str, str], ...],
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
    from ablate.reports.read.names import seeds_by_names
    from ablate.run.evaluations import notes_of
    from ablate.store import StudyStore
    from ablate.workflow.import_logs import LogImport

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
    parsed_target = None
    if target is not None:
        parsed_target = replace(target_of(target), crossing=crossing)
    elif crossing != "confirmed":
        raise UserError(
            "--crossing: there is no --target to cross (give one, or leave it out)"
        )
    if len(baselines) > 1:
        raise UserError(
            f"--baseline: {' and '.join(baselines)} (expected one arm: make a study for each)"
        )
    places = defaultdict(list)
    for name, place in arms:
        places[name].append(place)
    options["sizes"] = _each_once(options["sizes"], "--tokens-per-step")
    reading = {name: options.pop(name) for name in of_formats}
    logs = LogImport(kind=kind, files=files, arms=places, **reading)
    # Names go into every file of a report: they must not control a terminal or a page.
    runs_by_arm: dict[str, list[ImportedRun]] = defaultdict(list)
    for name, runs in logs.read().items():
        runs_by_arm[safe_text(name)].extend(runs)
    for line in logs.notes:
        click.echo(line)
    for fault in dict.fromkeys(logs.faults):
        click.echo(safe_text(fault), err=True)
    seeded, seed_notes = seeds_by_names(runs_by_arm)
    tidy, tidy_notes = tidied(seeded, options["waived"])
    echo_lines(seed_notes + tidy_notes)
    StudyStore(storage / study).refuse_unsafe()
    with as_user_error(f"cannot write to {storage}"):
        imported = with_settings(tidy, hardware, constant_from)
        store, left_out = write_study(
            storage / study,
            imported,
            baseline=safe_text(baselines[0]),
            target=parsed_target,
            loss_unit=logs.unit,
            **options,
        )
    for fault in left_out:
        click.echo(safe_text(fault), err=True)
    for name, runs in imported.items():
        num_evals = sum(len(run.evals) for run in runs)
        click.echo(f"{name}: {len(runs)} runs, {num_evals} evaluations")
        notes = notes_of({run.source: run.notes for run in runs})
        echo_lines(f"  {note}" for note in notes)
    if parsed_target is not None:
        echo_lines(schedule_hint(imported))
    click.echo(
        f"\nStudy: {store.path}\nNext:  {command_line('report', study, storage=storage)}"
    )
    return int(bool(logs.faults or left_out))


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
