"""What a person sees while a study runs: a live table on a terminal, plain lines anywhere else.

Both use ``ProgressReader`` alone, so that they show what is stored.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Self

from ablate.base.errors import safe_text
from ablate.cli.output import figure, verdict_lines
from ablate.execute.progress import ProgressReader, RunProgress, count_states, seconds_to_end
from ablate.store import STATES, State
from ablate.workflow import Listener

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    from ablate.reports import ReportPaths
    from ablate.store import StudyStore

_LINE_EVERY_SEC = 30.0
_REFRESH_SEC = 0.5
_SHOWN_OF_AN_ID = 8
_HALF_A_DAY_SEC = 43_200
_DAYS_FROM = 2
# What moves comes first; a terminal has few lines and a study may have thousands of runs.
_STYLES: dict[State, str] = {
    "running": "bold", "failed": "red", "damaged": "red", "diverged": "magenta", "interrupted": "yellow",
    "stopped": "cyan", "finished": "green", "pending": "dim",
}  # fmt: skip
_ORDER = list(_STYLES)


def format_count(n: float | None) -> str:
    """Return a count in k, M or B: 1234567 → 1.23M."""
    if n is None:
        return "–"
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= 0.9995 * size:  # three digits of 999,999 are 1M, not 1,000k
            return f"{n / size:.3g}{unit}"
    return f"{n:.0f}"


def format_seconds(seconds: float | None) -> str:
    """Return a duration as 1:02 or 3:04:05."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def arms_table(runs: Iterable[RunProgress]) -> Table:
    """Return a table with a line for each arm that fits 80 columns: its runs by state, and its tokens."""
    from rich.markup import escape
    from rich.table import Table

    by_arm: dict[str, list[RunProgress]] = {}
    for run in runs:
        by_arm.setdefault(run.arm, []).append(run)
    table = Table(box=None, pad_edge=False)
    table.add_column("arm", overflow="ellipsis", no_wrap=True, max_width=28)
    table.add_column("runs")
    table.add_column("tokens", justify="right", no_wrap=True)
    for arm, own in by_arm.items():
        tokens, budget = (
            format_count(sum(part)) for part in zip(*((r.tokens, r.budget) for r in own), strict=True)
        )
        table.add_row(escape(safe_text(arm)), summary(own), f"{tokens}/{budget}")
    return table


def progress_table(runs: Iterable[RunProgress], title: str | None = None, *, with_ids: bool = False) -> Table:
    """Return a table of runs that fits 80 columns; losses in nats per token.

    ``with_ids``: also the first letters of their ids, as ``ablate logs`` takes them; long names of arms wrap.
    """
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    if with_ids:
        table.add_column("run", no_wrap=True)
    table.add_column("arm", overflow="ellipsis", no_wrap=not with_ids, max_width=28)
    table.add_column("seed", justify="right")
    table.add_column("state", no_wrap=True)
    for name in ("tokens", "train", "val", "tok/s", "left"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(
            *([run.run_id[:_SHOWN_OF_AN_ID]] if with_ids else []),
            escape(safe_text(run.arm)),
            str(run.seed),
            f"[{_STYLES[run.state]}]{run.state}[/]",
            f"{format_count(run.tokens)}/{format_count(run.budget)}",
            figure(run.loss, ".4f"),
            figure(run.val_loss, ".4f"),
            format_count(run.tokens_per_sec),
            format_seconds(run.seconds_left),
        )
    return table


def summary(runs: list[RunProgress]) -> str:
    """Return the states in one line: ``8 of 12 done · 2 running · 2 pending``."""
    counts = count_states(runs)
    done = counts.get("finished", 0) + counts.get("diverged", 0)
    parts = [f"{done} of {len(runs)} done"]
    parts += [f"{counts[state]} {state}" for state in STATES if state != "finished" and counts.get(state)]
    return " · ".join(parts)


def end_text(runs: Iterable[RunProgress], *, at_most: bool, now: datetime | None = None) -> str:
    """Return when the runs will end, such as ``ends about 14:32 (12 min left)``; empty while that is unknown.

    ``at_most``: a stop rule may end them sooner. ``now``: local time.
    """
    seconds = seconds_to_end(runs)
    if seconds is None:
        return ""
    now = now or datetime.now().astimezone()
    end = now + timedelta(seconds=seconds)
    clock = end.strftime("%H:%M" if seconds < _HALF_A_DAY_SEC else "%a %d %b %H:%M")
    minutes = round(seconds / 60)
    hours, days = minutes // 60, minutes // 1440
    left = f"{minutes} min" if minutes else "under 1 min"
    if days >= _DAYS_FROM:
        left = f"{days} d {hours % 24} h"
    elif hours:
        left = f"{hours} h {minutes % 60:02d} min"
    return f"ends by about {clock} ({left} left at most)" if at_most else f"ends about {clock} ({left} left)"


class LiveDisplay(AbstractContextManager["LiveDisplay"]):
    """Shows the given runs until the block ends; ``update`` may be called as often as one likes."""

    def __init__(self, reader: ProgressReader, run_ids: Sequence[str], console: Console) -> None:
        self._reader = reader
        self._run_ids = run_ids
        self._console = console
        self._started = time.monotonic()
        self._last_drawn = 0.0
        self._states: dict[str, State] = {}
        self._last_line = float("-inf")
        self._end_known = False
        self._live: Live | None = None
        self._waves = reader.in_waves

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.update(force=True)
        if self._live is not None:
            self._live.stop()

    def update(self, *, force: bool = False) -> None:
        """Redraw if the interval has passed."""
        now = time.monotonic()
        if force or now - self._last_drawn >= _REFRESH_SEC:
            runs = self._reader.read(self._run_ids)
            whole = self._reader.read() if self._waves else runs  # the next wave is not asked for yet
            end = end_text(whole, at_most=self._reader.may_end_sooner)
            elapsed = format_seconds(now - self._started)
            if self._live is None:
                self._print_lines(runs, elapsed, end)
            else:
                self._live.update(self._table(runs, elapsed, end), refresh=True)
            self._last_drawn = now

    def _table(self, runs: list[RunProgress], elapsed: str, end: str) -> Table:
        room = max(4, self._console.size.height - 7)
        shown = sorted(runs, key=lambda run: _ORDER.index(run.state))[:room]
        hidden = len(runs) - len(shown)
        words = [
            summary(runs),
            elapsed,
            *([f"{hidden} not shown"] if hidden else []),
            *([end] if end else []),
        ]
        return progress_table(shown, title=" · ".join(words))

    def _print_lines(self, runs: list[RunProgress], elapsed: str, end: str) -> None:
        changed = [run for run in runs if self._states.get(run.run_id, "pending") != run.state]
        for run in changed:
            self._states[run.run_id] = run.state
            detail = "" if run.val_loss is None else f", val loss {run.val_loss:.4f} nats/token"
            detail += f" at {format_count(run.tokens)} tokens" if run.tokens else ""
            detail += f": {run.message}" if run.message else ""
            self._line(safe_text(f"[{elapsed}] {run.arm} seed {run.seed}: {run.state}{detail}"))
        first_end = bool(end) and not self._end_known
        self._end_known |= first_end
        if changed or first_end or time.monotonic() - self._last_line >= _LINE_EVERY_SEC:
            self._line(f"[{elapsed}] {summary(runs)}{f' · {end}' if end else ''}")

    def _line(self, text: str) -> None:
        self._last_line = time.monotonic()
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def console_listener(*, stderr: bool = False) -> ConsoleListener:
    """Return a listener that prints."""
    from rich.console import Console

    return ConsoleListener(Console(highlight=False, stderr=stderr))


class ConsoleListener(Listener):
    """Prints sentences, and shows the progress of token files and runs."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, sentence: str) -> None:
        """Print a sentence as it is; the terminal breaks a long line."""
        self.console.print(sentence, markup=False, soft_wrap=True)

    def reported(self, written: ReportPaths) -> None:
        """Print the verdict, and where the report is."""
        for line in ("", *verdict_lines(written), f"\nReport:  {written.html}"):
            self.say(line)

    @contextmanager
    def preparing(self) -> Iterator[Callable[[str, float, str], None]]:
        """Show a bar for each corpus that is not ready yet; no terminal: a line for each step."""
        if not self.console.is_terminal:
            said: set[tuple[str, str]] = set()

            def tell(digest: str, _fraction: float, what: str) -> None:
                if (digest, what) not in said:
                    said.add((digest, what))
                    self.say(f"Preparing the corpus: {what} …")

            yield tell
            return
        from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        tasks: dict[str, TaskID] = {}
        with Progress(*columns, console=self.console, transient=True) as bar:

            def show(digest: str, fraction: float, what: str) -> None:
                if digest not in tasks:
                    tasks[digest] = bar.add_task("tokens", total=1.0)
                bar.update(tasks[digest], completed=fraction, description=what)

            yield show

    @contextmanager
    def executing(self, store: StudyStore, run_ids: Sequence[str]) -> Iterator[Callable[[], None]]:
        """Show the live table of these runs."""
        with LiveDisplay(ProgressReader(store), run_ids, self.console) as display:
            yield display.update
