"""What a person sees while a study runs: a live table on a terminal, plain lines anywhere else.

Both use ``ProgressReader`` alone, so that they show what is stored.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import click

from ablate.base.errors import safe_text
from ablate.cli.common import count_text, table_of, verdict_lines
from ablate.execute.progress import ProgressReader, RunProgress, count_states, seconds_to_end
from ablate.plan.estimate import duration_text
from ablate.store import STATES, State
from ablate.workflow import Listener

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rich.live import Live
    from rich.progress import TaskID
    from rich.text import Text

    from ablate.reports import ReportPaths
    from ablate.store import StudyStore

_LINE_EVERY_SEC = 30.0
_REFRESH_SEC = 0.5
# Running runs come first: a terminal has few lines, and a study may have thousands of runs.
_STYLES: dict[State, str] = {
    "running": "bold", "failed": "red", "damaged": "red", "diverged": "magenta", "interrupted": "yellow",
    "stopped": "cyan", "finished": "green", "pending": "dim",
}  # fmt: skip
_ORDER = list(_STYLES)


_RUNS = {
    "run": "{of.run_id:.8}", "arm": "{of.arm}", "seed": "{of.seed}", "state": "{of.state}",
    "tokens": "{of.tokens:count}/{of.budget:count}", "train": "{of.loss:.4f}", "val": "{of.val_loss:.4f}",
    "tok/s": "{of.tokens_per_sec:count}", "left": "{of.seconds_left:time}",
}  # fmt: skip
"""The first letters of an id are enough for ``ablate logs``; losses are in nats per token."""
_ARMS = {"arm": "{arm}", "runs": "{runs}", "tokens": "{tokens:count}/{budget:count}"}


def runs_table(runs: Iterable[RunProgress]) -> str:
    """Return a table with a line for each run."""
    return safe_text(table_of(_RUNS, ({"of": run} for run in runs)), keep="\n")


def arms_table(runs: Iterable[RunProgress]) -> str:
    """Return a table with a line for each arm: its runs by state, and its tokens."""
    by_arm: dict[str, list[RunProgress]] = defaultdict(list)
    for run in runs:
        by_arm[run.arm].append(run)
    rows = []
    for arm, own in by_arm.items():
        tokens, budget = sum(run.tokens for run in own), sum(run.budget for run in own)
        rows.append({"arm": arm, "runs": summary(own), "tokens": tokens, "budget": budget})
    return safe_text(table_of(_ARMS, rows), keep="\n")


def summary(runs: list[RunProgress]) -> str:
    """Return the states in one line: ``8 of 12 done · 2 running · 2 pending``."""
    counts = count_states(runs)
    done = counts.get("finished", 0) + counts.get("diverged", 0)
    parts = [f"{done} of {len(runs)} done"]
    parts += [f"{counts[state]} {state}" for state in STATES if state != "finished" and counts.get(state)]
    return " · ".join(parts)


def end_text(runs: Iterable[RunProgress], *, at_most: bool, now: datetime | None = None) -> str:
    """Return when the runs will end, such as ``ends about Mon 14:32 (12 min left)``; empty if unknown.

    ``at_most``: a stop rule may end them sooner. ``now``: local time; None: the present.
    """
    seconds = seconds_to_end(runs)
    if seconds is None:
        return ""
    end = (now or datetime.now().astimezone()) + timedelta(seconds=seconds)
    return f"ends {'by' * at_most or 'about'} {end:%a %d %b %H:%M} ({duration_text(seconds)} left)"


class ConsoleListener(Listener):
    """Prints sentences, and shows the progress of token files and runs; ``err``: on standard error."""

    def __init__(self, *, err: bool = False) -> None:
        self.err = err

    def say(self, sentence: str) -> None:
        """Print a sentence in one line; the terminal breaks a long one."""
        click.echo(sentence, err=self.err)

    def reported(self, written: ReportPaths) -> None:
        """Print the verdict, and where the report is."""
        for line in ("", *verdict_lines(written), f"\nReport:  {written.html}"):
            self.say(line)

    @contextmanager
    def preparing(self) -> Iterator[Callable[[str, float, str], None]]:
        """Show a bar for each corpus that is not ready yet; without a terminal, a line for each step."""
        from rich.console import Console
        from rich.progress import Progress

        console, said = Console(stderr=self.err), set()
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            tasks: dict[str, TaskID] = defaultdict(lambda: bar.add_task("tokens", total=1.0))

            def show(digest: str, fraction: float, what: str) -> None:
                bar.update(tasks[digest], completed=fraction, description=what)
                if bar.disable and (digest, what) not in said:
                    said.add((digest, what))
                    self.say(f"Preparing the corpus: {what} …")

            yield show

    @contextmanager
    def executing(self, store: StudyStore, run_ids: Sequence[str]) -> Iterator[Callable[[], None]]:
        """Show these runs: as a live table on a terminal, else a line for each change of a state."""
        reader, started = ProgressReader(store), time.monotonic()
        states: dict[str, State] = {}
        drawn = told = -math.inf
        live: Live | None = None
        if (sys.stderr if self.err else sys.stdout).isatty():
            from rich.console import Console
            from rich.live import Live

            live = Live(console=Console(stderr=self.err), auto_refresh=False, transient=True)

        def draw() -> None:
            nonlocal drawn, told
            drawn = time.monotonic()
            runs = reader.read(run_ids)
            whole = reader.read() if reader.in_waves else runs  # the next wave is not asked for yet
            clock = f"[{timedelta(seconds=round(drawn - started))}]"
            end = end_text(whole, at_most=reader.may_end_sooner)
            line = " · ".join(filter(None, (f"{clock} {summary(runs)}", end)))
            if live is not None:
                live.update(_live_table(line, runs), refresh=True)
                return
            changed = [run for run in runs if states.get(run.run_id, "pending") != run.state]
            for run in changed:
                states[run.run_id] = run.state
                detail = "" if run.val_loss is None else f", val loss {run.val_loss:.4f} nats/token"
                detail += f" at {count_text(run.tokens)} tokens" if run.tokens else ""
                detail += f": {run.message}" if run.message else ""
                self.say(safe_text(f"{clock} {run.arm} seed {run.seed}: {run.state}{detail}"))
            if changed or drawn - told >= _LINE_EVERY_SEC:
                told = drawn
                self.say(line)

        def poll() -> None:
            if time.monotonic() - drawn >= _REFRESH_SEC:
                draw()

        with live or nullcontext():
            try:
                yield poll
            finally:
                draw()


def _live_table(line: str, runs: list[RunProgress]) -> Text:
    """Show as many runs as fit the terminal's lines, running ones first."""
    from rich.text import Text

    room = max(4, shutil.get_terminal_size().lines - 7)
    shown = sorted(runs, key=lambda run: _ORDER.index(run.state))[:room]
    text = Text(f"{line}\n{runs_table(shown)}", no_wrap=True, overflow="ellipsis")
    for state, style in _STYLES.items():
        text.highlight_words([state], style)
    return text
