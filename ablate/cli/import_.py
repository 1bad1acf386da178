"""``ablate import``: make a study of logs that others wrote."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import partial, wraps
from itertools import chain, pairwise
from math import inf, isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from ablate.base.command_hints import command_line
from ablate.base.errors import UserError, likely, one_of, safe_text
from ablate.cli.common import AT_LEAST_1, Place, storage_option

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from ablate.reports.read.imported import ImportedRun
    from ablate.reports.read.tables import Stages
    from ablate.store.plan_file import Target

    Crossing = Literal["confirmed", "first_eval"]
    _Decorator = Callable[[Any], Any]
    _Found = tuple[Mapping[str, Sequence[ImportedRun]], list[str]]
    """Runs by arm, and a line for each fault."""
    StepSizes = dict[str, Stages]
    """The tokens of a step by arm; '' of every other."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class _Importers(click.Group):
    """A group that answers an unknown name with those that it knows."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = super().get_command(ctx, cmd_name)
        if found is None and not cmd_name.startswith("-"):
            hint = likely(cmd_name, self.commands, f"expected {one_of(list(self.commands))}")
            raise UserError(f"no command '{cmd_name}' ({hint})")
        return found


@click.group("import", cls=_Importers, no_args_is_help=True)
def command() -> None:
    """Make a study of logs that others wrote, so that `ablate report` and MLflow work on it.

    What does not parse is named by file and line, the rest goes on, and the exit code is then 1. Folders are
    searched with all that is in them. Without --target the arms are compared by their final losses.

    \b
    Examples:
      ablate import mllog --study fp4-vs-fp8 --arm NVFP4=logs/nvidia --arm FP8=logs/dell \\
          --baseline FP8 --target val_loss=3.3
      ablate import csv --study mine --arm fp8=fp8.csv --arm fp4=fp4.csv --baseline fp8 \\
          --target perplexity=20 --columns tokens=step,val_loss=eval/loss --tokens-per-step 524288
      ablate import csv evaluations.csv --study theirs --baseline bf16 --target val_loss=1.8 --paired
      ablate import text --study nano --arm old=logs/old --arm new=logs/new --arm new=more/new \\
          --pattern 'step:(?P<step>\\d+)/\\d+ val_loss:(?P<val_loss>\\S+) train_time:(?P<ms>\\d+)ms' \\
          --tokens-per-step 393216 --baseline old --target val_loss=3.3 --hardware '8x NVIDIA H100'
      ablate import csv final.csv --study ends --baseline bf16
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
        click.option(
            "--target",
            help="val_loss=3.3 (nats per token) or perplexity=27.1. Default: final losses are compared.",
        ),
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
        click.option(
            "--constant-from", type=click.IntRange(min=0), metavar="TOKENS",
            help="The learning rate is constant from these tokens on in all runs, which no log tells: T is "
            "then read off a local fit.",
        ),
        click.option(
            "--hardware", metavar="'8x NVIDIA H100'",
            help="What all runs were trained on, where no log tells: for the speed-up as logged.",
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
    from ablate.reports.read.imported import ImportedStudy, machine, tidied, write_study

    target, crossing = options.pop("target"), options.pop("crossing")
    shown = {
        key: options.pop(key)
        for key in ("paired_seeds", "waived", "hardware", "constant_from", "description")
    }
    if shown["hardware"] is not None:
        machine(shown["hardware"])
    if not _NAME.fullmatch(study):
        raise UserError(f"--study: '{study}' is no folder name (letters, digits, '.', '_' and '-')")
    if target is None and crossing != "confirmed":
        raise UserError("--crossing: there is no --target to cross (give one, or leave it out)")
    parsed = None if target is None else _target(target, crossing)
    if len(baselines) > 1:
        raise UserError(f"--baseline: {' and '.join(baselines)} (expected one arm: make a study for each)")
    found, faults = read(**options)
    faults = list(dict.fromkeys(faults))
    for fault in faults:
        click.echo(safe_text(fault), err=True)
    # Names go into every file of a report, and steer no terminal or page.
    named: dict[str, list[ImportedRun]] = {}
    for name, runs in found.items():
        named.setdefault(safe_text(name), []).extend(runs)
    found, done = tidied(named, shown["waived"])
    for sentence in done:
        click.echo(safe_text(sentence))
    made = ImportedStudy(name=study, arms=found, baseline=safe_text(baselines[0]), target=parsed, **shown)
    try:
        store, left_out = write_study(made, storage / study)
    except OSError as error:
        raise UserError(f"cannot write to {storage}: {error.strerror or error}") from error
    for fault in left_out:
        click.echo(safe_text(fault), err=True)
    for name, runs in found.items():
        click.echo(f"{name}: {len(runs)} runs, {sum(len(run.evals) for run in runs)} evaluations")
    click.echo(f"\nStudy: {store.path}\nNext:  {command_line('report', study, storage=storage)}")
    click.get_current_context().exit(1 if faults or left_out else 0)


def _arm_option(text: str, *, required: bool = True) -> _Decorator:
    return click.option("--arm", "arms", multiple=True, required=required, help=f"NAME={text}; repeat it.")


def _step_sizes(_context: click.Context, _option: click.Parameter, texts: Sequence[str]) -> StepSizes:
    """Read ``524288``, ``0:65536,1000:131072`` (from which step on), or ``ARM=`` and one of these."""
    found: StepSizes = {}
    for text in texts:
        arm, _, value = text.rpartition("=")
        parts = [part.partition(":") for part in (value if ":" in value else f"0:{value}").split(",")]
        try:
            stages = tuple((float(start), float(tokens)) for start, _, tokens in parts)
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


def _stages_of(sizes: StepSizes, arms: Collection[str]) -> dict[str, Stages]:
    """Return each arm's stages; raise ``UserError`` for an unknown arm. '' is an arm of any name."""
    from ablate.reports.read.tables import TOKENS

    for name in sizes:
        if name and name not in arms:
            raise UserError(f"--tokens-per-step: no --arm {name}=… is given")
    return {arm: sizes.get(arm, sizes.get("", TOKENS)) for arm in ("", *arms)}


_tokens_per_step = click.option(
    "--tokens-per-step", "--tokens-unit", "sizes", multiple=True, callback=_step_sizes,
    metavar="[ARM=]NUMBER|STAGES",
    help="The tokens of a step where steps are counted, or of a unit, such as 1e9 for billions. Stages: "
    "0:65536,1000:131072 for 131,072 tokens from step 1,000 on. Repeat it for an arm of other steps.",
)  # fmt: skip
_of_tables: tuple[_Decorator, ...] = (
    click.argument("files", nargs=-1, type=Place(exists=True, path_type=Path)),
    _arm_option("FILE or NAME=FOLDER, in place of FILES", required=False),
    click.option(
        "--columns", default="",
        help="Ours=theirs, e.g. tokens=step,val_loss=eval/loss,run=name,seed=seed,seconds=time (or ms=…).",
    ),
    click.option("--run-column", metavar="NAME", help="What tells runs apart, as --columns run=NAME."),
    _tokens_per_step,
)  # fmt: skip


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


@_importer(
    "text",
    _arm_option("FILE or NAME=FOLDER"),
    click.option(
        "--pattern", "patterns", multiple=True, required=True,
        help="A regular expression with named groups: val_loss, and step or tokens (without, a file's last "
        "loss is its final one); seconds or ms since training began; seed. Several may share them; what an "
        "earlier line said holds on.",
    ),
    _tokens_per_step,
)  # fmt: skip
def text_(arms: tuple[str, ...], patterns: tuple[str, ...], sizes: StepSizes) -> _Found:
    """Read plain-text logs by patterns; each file is a run.

    A loss is best taken as \\S+, so that nan is read as a divergence. Lines 'step:500/5100 val_loss:4.1
    train_time:89000ms' are read by

    \b
      --pattern 'step:(?P<step>\\d+)/\\d+ val_loss:(?P<val_loss>\\S+) train_time:(?P<ms>\\d+)ms'
    """  # noqa: D301  \b is click's mark for a paragraph that keeps its line breaks
    from ablate.reports.read.tables import Columns, check_patterns, read_text, runs_of

    places = _named(arms)
    stages = _stages_of(sizes, places)
    found: dict[str, list[ImportedRun]] = {name: [] for name in places}
    faults: list[str] = []
    ready = check_patterns(patterns)
    groups = {name for pattern in ready for name in pattern.groupindex}
    counts_steps = "step" in groups
    if counts_steps and not sizes:
        raise UserError("--tokens-per-step: needed, because the pattern gives steps (a number, or stages)")
    if sizes and not groups & {"step", "tokens"}:
        raise UserError("--tokens-per-step: the pattern has no group (?P<step>…) (leave the option out)")
    names: dict[str, str] = {name: name for name in ("seconds", "ms") if name in groups}
    names |= {"tokens": "step"} if counts_steps else {}
    for name, path in _files_of(places, ("*.txt", "*.log", "*.out")):
        rows, wrong = read_text(path, ready)
        runs, more = runs_of(path, rows, Columns(names=names, stages=stages[name]))
        faults += [*wrong, *more]
        found[name] += runs.get(None, [])
    return found, faults


@_importer("csv", *_of_tables)
def csv_(**options: Any) -> _Found:
    """Read CSV files with one row an evaluation; or, without a column of tokens, a final loss a row.

    FILES have a column `arm`, as the evaluations.csv of a report of ours has; or name each arm's by --arm.
    """
    from ablate.reports.read.tables import read_csv

    return _tables(read_csv, ("*.csv",), **options)


@_importer("jsonl", *_of_tables)
def jsonl(**options: Any) -> _Found:
    """Read files of JSON lines with one object an evaluation; or, without a key of tokens, a final loss each.

    FILES have a key `arm`; or name each arm's by --arm.
    """
    from ablate.reports.read.tables import read_jsonl

    return _tables(read_jsonl, ("*.jsonl", "*.json"), **options)


@_importer(
    "wandb-export",
    click.argument("file", type=Place(path_type=Path)),
    _arm_option("PATTERN on the runs' names"),
    click.option("--metric", help="Where the chart has several."),
    _tokens_per_step,
)
def wandb_export(file: Path, arms: tuple[str, ...], metric: str | None, sizes: StepSizes) -> _Found:
    """Read FILE, the CSV that a W&B chart exports: columns 'RUN - METRIC'."""
    from ablate.reports.read.tables import Columns, by_pattern, read_wandb_chart, runs_of

    stages = _stages_of(sizes, _named(arms))
    if len(set(stages.values())) > 1:
        raise UserError("--tokens-per-step: a chart has one axis of steps for all arms (leave ARM= out)")
    rows, faults = read_wandb_chart(file, metric)
    found, wrong = runs_of(file, rows, Columns(names={}, stages=stages[""]))
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
def mlflow(
    tracking_uri: str, experiment: str, arms: tuple[str, ...], sizes: StepSizes, **options: Any
) -> _Found:
    """Read the runs of an experiment on any MLflow tracking server."""
    from ablate.reports.read.tracking import read_mlflow

    named = _named(arms)
    return read_mlflow(tracking_uri, experiment, arms=named, stages=_stages_of(sizes, named), **options)


def _tables(
    read: Callable[[Path], Any],
    patterns: Sequence[str],
    *,
    files: tuple[Path, ...],
    arms: tuple[str, ...],
    columns: str,
    run_column: str | None,
    sizes: StepSizes,
) -> _Found:
    from ablate.reports.read.tables import NEEDED, OPTIONAL, Columns, runs_of

    if bool(files) == bool(arms):
        raise UserError("expected FILES with a column of arms, or --arm NAME=FILE for each arm")
    names: dict[str, str] = {}
    told = [*columns.split(","), *([f"run={run_column}"] if run_column else [])]
    for name, column in _pairs(filter(None, told), "--columns", "tokens=step"):
        if name in names:
            raise UserError(f"--columns: '{name}' is given twice")
        names[name] = column
    known = (*NEEDED, *OPTIONAL)
    for name in names:
        if name not in known:
            raise UserError(f"--columns: no column of ours is '{name}' (expected {', '.join(known)})")
    places = _named(arms)
    stages = _stages_of(sizes, places)
    found: dict[str, list[ImportedRun]] = {name: [] for name in places}
    faults: list[str] = []
    asked: Iterator[tuple[str | None, Path]]
    everywhere = chain.from_iterable(_found_in(path, "FILES", patterns) for path in files)
    asked = chain(_files_of(places, patterns), ((None, path) for path in everywhere))
    for wanted, path in asked:
        rows, wrong = read(path)
        mapping = Columns(names=names, stages=stages[wanted or ""])
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


def _named(arms: Sequence[str]) -> dict[str, list[str]]:
    """Return what is given for each arm, of which there may be several."""
    found: dict[str, list[str]] = {}
    for name, value in _pairs(arms, "--arm", "FP8=logs/fp8"):
        found.setdefault(name, []).append(value)
    return found


def _pairs(parts: Iterable[str], option: str, example: str) -> Iterator[tuple[str, str]]:
    for part in parts:
        name, equals, value = part.partition("=")
        if not (name.strip() and equals and value.strip()):
            raise UserError(f"{option}: expected NAME=VALUE, got '{part}' (such as {example})")
        yield name.strip(), value.strip()


def _files_of(arms: Mapping[str, Sequence[str]], patterns: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield each arm's files."""
    for arm, places in arms.items():
        for path in dict.fromkeys(
            chain.from_iterable(_found_in(Path(one), f"--arm {arm}", patterns) for one in places)
        ):
            yield arm, path


def _found_in(where: Path, option: str, patterns: Sequence[str]) -> list[Path]:
    """Return a file; or of a folder and those in it the files of the first pattern that any has, in order.

    Hidden files are skipped. How many other files there are is printed.
    """
    if where.is_file():
        return [where]
    if not where.exists():
        raise UserError(f"{option}: {where} does not exist")
    everything = sorted(
        path
        for path in where.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(where).parts)
    )
    for pattern in patterns:
        found = [path for path in everything if fnmatchcase(path.name, pattern)]
        if found:
            left = f", {len(everything) - len(found)} others not read" if len(found) < len(everything) else ""
            click.echo(f"{where}: {len(found)} files like {pattern}{left}")
            return found
    raise UserError(f"{option}: nothing like {' or '.join(patterns)} in {where} or its folders")


def _target(text: str, crossing: Crossing) -> Target:
    from ablate.store.plan_file import Target

    kind, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = nan
    if kind not in ("val_loss", "perplexity") or not isfinite(number):
        raise UserError(f"--target: expected val_loss=NUMBER or perplexity=NUMBER, got '{text}'")
    if kind == "perplexity" and number <= 1:
        raise UserError(f"--target: a perplexity is above 1, got {number:g}")
    return Target(kind="val_loss" if kind == "val_loss" else "perplexity", value=number, crossing=crossing)
