"""``ablate pilot``: two runs of the baseline, and the target, the seeds and the time that they ask for."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ablate.base.command_hints import command_line
from ablate.cli.common import address_option, ended_by_ctrl_c, json_option, storage_option, tracking_option
from ablate.cli.output import echo_json, format_table, terminal_width

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ablate.plan.pilot import Advice


@click.command("pilot")
@click.argument("study")
@click.option("--write", is_flag=True, help="Put the target into the file, in place of 'target: null'.")
@click.option("--retry-failed", is_flag=True, help="Run failed runs again, too.")
@json_option
@address_option
@tracking_option
@storage_option
def command(
    study: str,
    storage: Path,
    address: str | None,
    tracking_uri: str | None,
    as_json: bool,
    write: bool,
    retry_failed: bool,
) -> int:
    """Train the baseline of STUDY with its first two seeds, and say what the study needs.

    Which target to take: one that both runs reach with room for slower arms. How many seeds find a cost of
    which size, by how much the two runs differ. How long the rest of the study takes. The runs are the
    study's own: `ablate run` afterwards trains only what is missing. A study without a target yet says
    'target: null'.

    \b
    Examples:
      ablate pilot my-study.yaml
      ablate pilot my-study.yaml --write && ablate run my-study.yaml
    """  # noqa: D301  \b is click's mark for a paragraph that keeps its line breaks
    place = {"address": address, "tracking_uri": tracking_uri}
    again = command_line("pilot", study, *["--write"] * write, storage=storage, **place)
    with ended_by_ctrl_c(again):
        from ablate.cli.display import console_listener
        from ablate.cli.run import conclude
        from ablate.workflow import Where
        from ablate.workflow.pilot import pilot_study

        listener = console_listener(stderr=as_json)
        where = Where(storage=storage, address=address, tracking_uri=tracking_uri)
        end, advice = pilot_study(study, where, listener, write=write, retry_failed=retry_failed)
        code = conclude(listener.console, end, again)
    if advice is None:
        return code
    if as_json:
        echo_json(asdict(advice))
    else:
        click.echo("\n" + "\n".join(advice_text(advice, written=write)))
        if advice.take is not None:
            run = command_line("run", study, storage=storage, **place)
            click.echo(f"\nNext:  {run}  (trains only what is missing)")
    return code if advice.take is not None else 1


def advice_text(advice: Advice, *, written: bool) -> Iterator[str]:
    """Yield the lines that say what the pilot found."""
    yield from _target_text(advice, written=written)
    spread = advice.spread
    if spread is not None:
        used = f"; below, pairs of runs spread by {spread.pairs:.1%}"
        yield (f"spread   of log tokens to target: {spread.runs:.1%}, known badly from two runs{used}")
        rows = [
            (
                f"{one.cost:.0%}",
                "more than 30" if one.seeds is None else str(one.seeds),
                _left_text(one.seconds),
            )
            for one in advice.needed
        ]
        yield "\n" + format_table(
            ("to find a token cost of", "seeds", "the rest of the study takes"), rows, width=terminal_width()
        )
    yield f"\ntime     {_time_text(advice)}"


def _left_text(seconds: float | None) -> str:
    from ablate.plan.estimate import duration_text

    if seconds is None:
        return "–"
    return f"about {duration_text(seconds)}" if seconds else "nothing is left to run"


def _target_text(advice: Advice, *, written: bool) -> Iterator[str]:
    take = advice.take
    if take is None:
        yield f"target   none to be had: {advice.why_not}"
        return
    reached = " and ".join(f"{tokens:,.0f}" for tokens in take.tokens.values())
    seeds = " and ".join(map(str, take.tokens))
    said = f"seeds {seeds} reach {take.val_loss:g} nats per token after {reached} tokens"
    room = f"an arm that needs up to {take.room:.0%} more still reaches it"
    if take is advice.own:
        yield f"target   the study's own will do: {said}; {room}"
        return
    if advice.has_target:
        own = "is reached too late" if advice.own else "is not reached by both runs"
        yield f"target   the study's own {own}; take instead:"
    else:
        yield "target   written into the file:" if written else "target   write into the file:"
    yield f"\n         target: {{val_loss: {take.val_loss:g}}}\n"
    yield f"         {said}; {room}"


def _time_text(advice: Advice) -> str:
    most = "at most " if advice.may_end_sooner else ""
    text = f"the rest of the study, {most}{advice.seeds} seeds an arm: {_left_text(advice.seconds)}"
    if not advice.seconds:
        return text
    others = {name: factor for name, factor in advice.slower.items() if name != advice.baseline}
    if not others:
        return f"{text}, with all arms as fast as the baseline; emulated formats take longer"
    slowest = max(others, key=others.__getitem__)
    low, high = (f"{factor:.1f}" for factor in (min(others.values()), others[slowest]))
    times = high if low == high else f"{low} to {high}"
    slower = f"a token of an arm takes {times} times the baseline's time (most: {slowest})"
    emulated = ", emulated here, which says nothing of FP4 hardware" if advice.emulated else ""
    return f"{text}; {slower}{emulated}"
