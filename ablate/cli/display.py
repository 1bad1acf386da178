"""What a person sees while a study runs, by ``read_progress`` alone: what is stored is shown."""

from __future__ import annotations

import math
import sys
import time
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from ablate.base.counts import count_text
from ablate.base.errors import safe_text
from ablate.cli.common import verdict_lines
from ablate.execute.progress import (
    RunProgress,
    count_states,
    read_progress,
    seconds_to_end,
)
from ablate.plan.estimate import duration_text
from ablate.store import STATES, State
from ablate.workflow import Listener

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ablate.reports import ReportPaths
    from ablate.store import StudyStore

_LINE_EVERY_SEC = 30.0
_REFRESH_SEC = 0.5


def summary(runs: list[RunProgress]) -> str:
    """Return the states in one line: ``8 of 12 done · 2 running · 2 pending``."""
    counts = count_states(runs)
    num_done = counts.get("finished", 0) + counts.get("diverged", 0)
    others = [
        f"{counts[state]} {state}"
        for state in STATES
        if state != "finished" and counts.get(state)
    ]
    return " · ".join([f"{num_done} of {len(runs)} done", *others])


def end_text(
    runs: Iterable[RunProgress], *, at_most: bool, now: datetime | None = None
) -> str:
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
        # Not by click: the stream that rich puts in a terminal's place has no encoding.
        print(sentence, file=sys.stderr if self.err else sys.stdout, flush=True)

    def reported(self, written: ReportPaths) -> None:
        """Print the verdict, and where the report is."""
        for line in ("", *verdict_lines(written), f"\nReport:  {written.html}"):
            self.say(line)

    @contextmanager
    def preparing(self) -> Iterator[Callable[[str, float, str], None]]:
        """Say each step of each corpus that is not ready yet; on a terminal its share stands below."""
        from rich.console import Console

        shown = set()
        with Console(stderr=self.err).status("", refresh_per_second=1) as status:

            def show(digest: str, fraction: float, what: str) -> None:
                if (digest, what) not in shown:
                    shown.add((digest, what))
                    self.say(f"Preparing the corpus: {what} …")
                status.update(f"{fraction:.0%}")

            yield show

    @contextmanager
    def executing(
        self, store: StudyStore, run_ids: Sequence[str]
    ) -> Iterator[Callable[[], None]]:
        """Say each change of a run; how far they are, twice a minute or, on a terminal, all the time."""
        from rich.console import Console
        from rich.markup import escape

        plan = store.plan()
        started = time.monotonic()
        states: dict[str, State] = {}
        looked = told_sec = -math.inf
        console = Console(stderr=self.err)

        def look() -> None:
            nonlocal looked, told_sec
            looked = time.monotonic()
            runs = read_progress(store, plan, run_ids)
            # A wave of seeds is not all: the next one is not asked for yet.
            whole = runs if plan.settled is None else read_progress(store, plan)
            clock = f"[{timedelta(seconds=round(looked - started))}]"
            end = end_text(whole, at_most=plan.stop is not None)
            line = " · ".join(filter(None, (f"{clock} {summary(runs)}", end)))
            changed = [
                run for run in runs if states.get(run.run_id, "pending") != run.state
            ]
            for run in changed:
                states[run.run_id] = run.state
                text = f"{clock} {run.arm} seed {run.seed}: {run.state}"
                if run.val_loss is not None:
                    text += f", val loss {run.val_loss:.4f} {plan.unit}"
                if run.tokens:
                    text += f" at {count_text(run.tokens)} tokens"
                if run.message:
                    text += f": {run.message}"
                self.say(safe_text(text))
            status.update(escape(line))
            is_due = changed or looked - told_sec >= _LINE_EVERY_SEC
            if is_due and not console.is_terminal:
                told_sec = looked
                self.say(line)

        def poll() -> None:
            if time.monotonic() - looked >= _REFRESH_SEC:
                look()

        with console.status("", refresh_per_second=1) as status:
            try:
                yield poll
            finally:
                look()
