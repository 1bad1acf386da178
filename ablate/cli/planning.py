"""``ablate init``, ``plan`` and ``pilot``: what comes before a study's runs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ablate.base.command_hints import command_line
from ablate.base.errors import UserError
from ablate.cli.common import (
    PATH,
    address_option,
    count_option,
    deliver,
    ended_by_ctrl_c,
    flag,
    json_option,
    refuse_other_options,
    set_option,
    storage_option,
    study_argument,
    table_of,
    tracking_option,
)
from ablate.modelled.hardware import PEAKS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ablate.plan.pilot import Advice

_NEEDED = {
    "to find a token cost of": "{of.cost:.0%}", "seeds (–: more than 30)": "{of.seeds}",
    "the rest of the study takes": "{of.seconds:time}",
}  # fmt: skip


@click.command("init")
@click.argument("file", default="study.yaml", type=PATH)
@click.option(
    "--model",
    metavar="WORD",
    help="Model: built-in, a preset, hf:FOLDER or function:FILE.py:NAME.",
)
@click.option(
    "--data", metavar="PATH", help="Text or JSON lines: a file, a folder or a glob."
)
@click.option("--arms", metavar="WORD", help="Arms: ladder, published or grid.")
@click.option(
    "--tokenizer", metavar="WORD", help="Tokenizer: bytes, bpe:VOCABULARY or hf:FOLDER."
)
@count_option("--seeds", help="Runs of each arm (default: 3).")
@click.option(
    "--budget",
    metavar="TIME",
    help="Wall time of the whole study on this machine: 30m, 2h, 1d.",
)
@click.option(
    "--command", metavar="LINE", help="Your own training program; needs --log."
)
@click.option(
    "--log", type=PATH, help="With --command: what the program printed in a run."
)
@click.option(
    "--pattern",
    "patterns",
    multiple=True,
    metavar="REGEX",
    help="With --command: a regular expression that reads its log.",
)
@flag(
    "--schema",
    help="Only print the JSON Schema of study files, for editors.",
)
@storage_option
@click.pass_context
def init(
    context: click.Context, /, file: Path, storage: Path, *, schema: bool, command: str | None,
    log: Path | None, patterns: tuple[str, ...], **given: Any,
) -> None:  # fmt: skip
    """Write a commented study to FILE (default: study.yaml), which must not be there yet.

    On a terminal the command asks for what no option says. Elsewhere it takes the built-in model, the
    standard library's text, the ladder and 30 minutes. It times some steps of each arm, to see how many fit
    the budget.

    An editor with yaml-language-server completes and checks study files that begin with this line:
    # yaml-language-server: $schema=study.schema.json

    \b
    Examples:
      ablate init
      ablate init ladder.yaml --data corpus/ --tokenizer bpe:4096 --seeds 5 --budget 2h
      ablate init own.yaml --model function:my_model.py:build --arms grid
      ablate init mine.yaml --command "python train.py --seed {seed}" --log train.log
      ablate init --schema > study.schema.json
    """  # noqa: D301  \b is click's mark for a paragraph that keeps its line breaks
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    plan = command_line("plan", str(file), storage=storage)
    if schema:
        from ablate.study.schema import json_schema

        refuse_other_options(context, {"schema"}, "--schema")
        click.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))
        return
    if command is not None or log is not None or patterns:
        from ablate.workflow.init_command import write_command_study

        refuse_other_options(
            context, {"command", "log", "patterns", "storage"}, "--command"
        )
        if command is None or log is None:
            hint = "a log of one run tells how to read it"
            raise UserError("--command and --log belong together", hint=hint)

        def ask(error: UserError) -> str:
            click.echo(error)
            prompt = "A regular expression with the groups step and val_loss"
            return str(click.prompt(prompt))

        written = write_command_study(
            file, command, log=log, patterns=patterns, ask=ask if is_terminal else None
        )
        click.echo(f"{written}\n\nNext:  {plan}")
        return
    from ablate.cli.display import ConsoleListener
    from ablate.run.architecture import PRESETS
    from ablate.study.template import ARMS
    from ablate.workflow.init import Answers, write_study

    questions = {
        "model": f"Model (built-in, {', '.join(PRESETS)}, hf:FOLDER or function:FILE.py:NAME)",
        "data": "Text to train on: a file, folder or glob; empty for the standard library's",
        "arms": "Arms: "
        + "; ".join(f"{word} ({title})" for word, title in ARMS.items()),
        "budget": "Wall time of the whole study (30m, 2h, 1d)",
    }
    answers = {name: word for name, word in given.items() if word is not None}
    for name, question in questions.items():
        if is_terminal and name not in answers:
            default = getattr(Answers, name) or ""
            word = click.prompt(question, default=default, show_default=bool(default))
            answers[name] = word or None
    written = write_study(file, storage, Answers(**answers), ConsoleListener())
    pilot = command_line("pilot", str(file), storage=storage)
    click.echo(f"{written}\n\nNext:  {plan}\n       {pilot}")


@click.command("plan")
@study_argument
@json_option
@flag(
    "--dry-run",
    help="Also build every arm's model without memory, and check all shapes.",
)
@flag("--layers", help="List what each linear layer of each arm carries.")
@flag("--runs", "all_runs", help="List every run with its id and state.")
@click.option(
    "--hardware",
    multiple=True,
    metavar="NAME",
    type=click.Choice(list(PEAKS)),
    help="Model memory and GPU-hours on this hardware, such as B200 (may be repeated).",
)
@set_option
@storage_option
def plan(study: str, settings: tuple[str, ...], **options: Any) -> None:
    """Show the runs of STUDY without starting any.

    STUDY is a YAML file, or the name of a shipped study. Runs that the storage already holds are shown with
    their state; `ablate run` would start the others. If data are missing, the plan shows all that does not
    depend on them, and then what is missing.

    Memory and GPU-hours on named hardware are modelled. They are shown for studies that take GPUs, and for
    any study with --hardware.

    \b
    Examples:
      ablate plan quickstart
      ablate plan my-study.yaml --set base.training.learning_rate=1e-3 --set seeds=5
      ablate plan my-study.yaml --json | jq '.arms[].name'
      ablate plan llama31-8b-mlperf --hardware MI355X
    """  # noqa: D301  \b is click's mark for a paragraph that keeps its line breaks
    from ablate.cli.plan_text import show_plan
    from ablate.study import load_study

    show_plan(load_study(study, settings), **options)


@click.command("pilot")
@study_argument
@flag(
    "--write",
    help="Put the target into the file, in place of 'target: null'.",
)
@flag("--retry-failed", help="Run failed runs again, too.")
@json_option
@address_option
@tracking_option
@storage_option
def pilot(
    study: str, as_json: bool, write: bool, retry_failed: bool, **where: Any
) -> int:
    """Train the baseline of STUDY with its first two seeds, and say what the study needs.

    It says which target to take: one that both runs reach with room for slower arms; how many seeds find a
    cost of which size, as the two runs differ; and how long the rest of the study takes. The runs are the
    study's own: `ablate run` then trains only what is missing. A study without a target yet says
    'target: null'.

    \b
    Examples:
      ablate pilot my-study.yaml
      ablate pilot my-study.yaml --write && ablate run my-study.yaml
    """  # noqa: D301  \b is click's mark for a paragraph that keeps its line breaks
    with ended_by_ctrl_c() as again:
        from ablate.cli.display import ConsoleListener
        from ablate.cli.run import conclude
        from ablate.workflow import Where
        from ablate.workflow.pilot import pilot_study

        listener = ConsoleListener(err=as_json)
        end, advice = pilot_study(
            study, Where(**where), listener, write=write, retry_failed=retry_failed
        )
        code = conclude(listener.say, end, again)
    if advice is None:
        return code
    deliver(asdict(advice), ["", *advice_text(advice, written=write)], as_json=as_json)
    if advice.take is None:
        return 1
    listener.say(
        f"\nNext:  {command_line('run', study, **where)}  (trains only what is missing)"
    )
    return code


def advice_text(advice: Advice, *, written: bool) -> Iterator[str]:
    """Say in lines what the pilot found; ``written``: the target is in the study file."""
    from ablate.plan.estimate import duration_text

    if take := advice.take:
        tokens = " and ".join(f"{tokens:,.0f}" for tokens in take.tokens.values())
        seeds = " and ".join(map(str, take.tokens))
        if take is advice.own:
            yield "target   the study's own will do"
        else:
            reason = ""
            if advice.has_target:
                reason = "the study's own is not reached by both runs, or too late; "
            yield f"target   {reason}{'written' if written else 'write'} into the file:"
            yield f"\n         target: {{val_loss: {take.val_loss:g}}}\n"
        yield f"         seeds {seeds} reach {take.val_loss:g} {advice.loss_unit} after {tokens} tokens;"
        yield f"         an arm that needs up to {take.room:.0%} more still reaches it"
    else:
        yield f"target   none to be had: {advice.why_not}"
    if spread := advice.spread:
        whose = "these two" if spread.is_own else "FP4 arms of docs/findings"
        yield (
            f"spread   of log tokens to target: {spread.runs:.1%}, known badly from two runs; below, pairs "
            f"of runs spread by {spread.pairs:.1%}, as {whose} do\n"
        )
        yield table_of(_NEEDED, ({"of": needed} for needed in advice.needed))
    most = "at most " if advice.may_end_sooner else ""
    if advice.seconds is None:
        duration = "not known"
    elif advice.seconds == 0:
        duration = "nothing to run"
    else:
        duration = f"about {duration_text(advice.seconds)}"
    yield f"\ntime     the rest of the study, {most}{advice.seeds} seeds an arm: {duration}"
    for name, factor in advice.slower.items():
        if name != advice.baseline:
            yield f"         a token of {name} takes {factor:.1f} times the baseline's time"
    if advice.emulated:
        yield "         emulated formats take longer here, which says nothing of FP4 hardware"
