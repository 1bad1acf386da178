"""What a person sees while a study runs: a live table on a terminal, plain lines anywhere else.

Both use ``ProgressReader`` alone, so that they show what is stored.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import defaultdict
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Self

import click

from ablate.base.errors import safe_text
from ablate.cli.common import count_text, table_of, verdict_lines
from ablate.execute.progress import ProgressReader, RunProgress, count_states, seconds_to_end
from ablate.plan.estimate import duration_text
from ablate.store import STATES, State
from ablate.workflow import Listener

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rich.progress import TaskID

    from ablate.reports import ReportPaths
    from ablate.store import StudyStore

_LINE_EVERY_SEC = 30.0
_REFRESH_SEC = 0.5
# What moves comes first; a terminal has few lines and a study may have thousands of runs.
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
"""An id has as many letters as ``ablate logs`` asks for; losses are in nats."""
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

    ``at_most``: a stop rule may end them sooner. ``now``: local time.
    """
    seconds = seconds_to_end(runs)
    if seconds is None:
        return ""
    end = (now or datetime.now().astimezone()) + timedelta(seconds=seconds)
    return f"ends {'by' * at_most or 'about'} {end:%a %d %b %H:%M} ({duration_text(seconds)} left)"


class LiveDisplay:
    """Shows the given runs until the block ends; ``update`` may be called as often as one likes."""

    def __init__(self, reader: ProgressReader, run_ids: Sequence[str], *, err: bool = False) -> None:
        self._reader = reader
        self._run_ids = run_ids
        self._err = err
        self._started = time.monotonic()
        self._last_drawn = self._last_line = float("-inf")
        self._states: dict[str, State] = {}
        self._end_known = False
        self._live = None
        if (sys.stderr if err else sys.stdout).isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=err), auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._last_drawn = float("-inf")
        self.update()
        if self._live is not None:
            self._live.stop()

    def update(self) -> None:
        """Redraw if the interval has passed."""
        now = time.monotonic()
        if now - self._last_drawn < _REFRESH_SEC:
            return
        self._last_drawn = now
        runs = self._reader.read(self._run_ids)
        whole = self._reader.read() if self._reader.in_waves else runs  # the next wave is not asked for yet
        end = end_text(whole, at_most=self._reader.may_end_sooner)
        clock = f"[{timedelta(seconds=round(now - self._started))}]"
        line = " · ".join(filter(None, (f"{clock} {summary(runs)}", end)))
        if self._live is not None:
            from rich.text import Text

            room = max(4, shutil.get_terminal_size().lines - 7)
            shown = sorted(runs, key=lambda run: _ORDER.index(run.state))[:room]
            text = Text(f"{line}\n{runs_table(shown)}", no_wrap=True, overflow="ellipsis")
            for state, style in _STYLES.items():
                text.highlight_words([state], style)
            self._live.update(text, refresh=True)
            return
        changed = [run for run in runs if self._states.get(run.run_id, "pending") != run.state]
        for run in changed:
            self._states[run.run_id] = run.state
            detail = "" if run.val_loss is None else f", val loss {run.val_loss:.4f} nats/token"
            detail += f" at {count_text(run.tokens)} tokens" if run.tokens else ""
            detail += f": {run.message}" if run.message else ""
            click.echo(safe_text(f"{clock} {run.arm} seed {run.seed}: {run.state}{detail}"), err=self._err)
        if changed or bool(end) > self._end_known or now - self._last_line >= _LINE_EVERY_SEC:
            self._end_known |= bool(end)
            self._last_line = now
            click.echo(line, err=self._err)


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
        """Show a bar for each corpus that is not ready yet; no terminal: a line for each step."""
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
        """Show the live table of these runs."""
        with LiveDisplay(ProgressReader(store), run_ids, err=self.err) as display:
            yield display.update
