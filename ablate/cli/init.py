"""``ablate init``: a first study file, from flags or from a few questions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ablate.base.command_hints import command_line
from ablate.base.errors import UserError
from ablate.cli.common import Place, storage_option

if TYPE_CHECKING:
    from collections.abc import Callable


@click.command("init")
@click.argument("file", default="study.yaml", type=Place(path_type=Path))
@click.option("--model", metavar="WORD", help="built-in, a preset, hf:FOLDER or function:FILE.py:NAME.")
@click.option("--data", metavar="PATH", help="Text, or JSON lines: a file, a folder or a glob.")
@click.option("--arms", metavar="WORD", help="ladder, published or grid.")
@click.option("--budget", metavar="TIME", help="Wall time of the whole study here: 30m, 2h, 1d.")
@storage_option
def command(file: Path, storage: Path, **given: str | None) -> None:
    """Write a commented study to FILE (default: study.yaml), which must not be there yet.

    What no option says is asked on a terminal. Elsewhere it is the built-in model, the standard library's
    text, the ladder and 30 minutes. Some steps of each arm are timed, to see how many fit the budget.

    \b
    Examples:
      ablate init
      ablate init ladder.yaml --data corpus/ --budget 2h
      ablate init own.yaml --model function:my_model.py:build --arms grid
    """  # noqa: D301  \b is click's mark for a paragraph that keeps its line breaks
    from ablate.cli.display import console_listener
    from ablate.plan.estimate import duration_text
    from ablate.workflow.init import Answers, write_study

    answers = {name: word for name, word in given.items() if word is not None}
    if sys.stdin.isatty() and sys.stdout.isatty():
        answers |= _asked(file, answers)
    written = write_study(file, Answers(**answers), storage, console_listener())
    click.echo(
        f"{file}: {written.runs} runs of {written.tokens:,} tokens, about {duration_text(written.seconds)} "
        f"in all ({written.ground})."
    )
    click.echo(f"\nNext:  {command_line('plan', str(file), storage=storage)}")
    click.echo(f"       {command_line('pilot', str(file), storage=storage)}")


def _asked(file: Path, given: dict[str, str]) -> dict[str, str]:
    """Ask what is not given; an answer that cannot be used is asked for again."""
    from ablate.run.presets import PRESETS
    from ablate.study.template import ARMS, known_arms, model_section
    from ablate.workflow.init import data_section, seconds_of

    def data(place: str) -> Any:
        return place and data_section(place, file.parent)

    listed = "\n".join(f"  {word:<10} {what}" for word, what in ARMS.items())
    questions: dict[str, tuple[str, str, Callable[[str], Any]]] = {
        "model": (
            f"Model (built-in, hf:FOLDER, function:FILE.py:NAME, or one of {', '.join(PRESETS)})",
            "built-in",
            model_section,
        ),
        "data": ("Text to train on (a file, folder or glob; empty: the standard library's)", "", data),
        "arms": (f"{listed}\nArms", "ladder", known_arms),
        "budget": ("Wall time of the whole study (30m, 2h, 1d)", "30m", seconds_of),
    }
    answers = {
        name: click.prompt(text, default=usual, value_proc=_checked(check), show_default=bool(usual))
        for name, (text, usual, check) in questions.items()
        if name not in given
    }
    return {name: word for name, word in answers.items() if word}


def _checked(check: Callable[[str], Any]) -> Callable[[str], str]:
    """Return a function that returns the answer, or tells click to ask again."""

    def read(word: str) -> str:
        try:
            check(word)
        except UserError as error:
            raise click.UsageError(str(error)) from None
        return word

    return read
