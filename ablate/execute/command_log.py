"""What a command says of its run: the new lines of its output and of its files, and the rows in them.

The rows that earlier attempts have written stand. A resumed command repeats some steps: rows that agree are
dropped, and of those that differ the first stands and the step is named.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from typing import TYPE_CHECKING, Any

from ablate.base.errors import UserError
from ablate.run.command import files_of
from ablate.run.log_rows import COLOURS
from ablate.run.schedule import divergence_bound, plan_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from ablate.run.config import RunConfig
    from ablate.run.log_rows import LogSource

_LONGEST_LINE = 1 << 20
_LOSS = {"train": "loss", "eval": "val_loss"}


class Rows:
    """The rows of a run over all its attempts. ``before``: those of earlier attempts."""

    def __init__(
        self,
        config: RunConfig,
        before: Iterable[Mapping[str, Any]],
        on_row: Callable[[dict[str, Any]], None],
        num_devices: int,
    ) -> None:
        self.plan = plan_steps(config.training)
        self._training, self._devices, self._on_row = config.training, num_devices, on_row
        self._bound = divergence_bound(config.training.divergence_loss, config.vocab_size)
        self._losses: dict[str, dict[int, float]] = {"train": {}, "eval": {}}
        for row in before:
            self._losses[row["kind"]][row["step"]] = row[_LOSS[row["kind"]]]
        self._before = {kind: dict(known) for kind, known in self._losses.items()}
        self.is_new = False
        self.different: list[int] = []

    @property
    def last(self) -> int:
        """The step of the last row, 0 without one."""
        return max(next(reversed(known), 0) for known in self._losses.values())

    @property
    def is_complete(self) -> bool:
        """Whether there is an evaluation, and the next row of each kind would come after the plan's end."""

        def reaches(steps: list[int]) -> bool:
            gap = max((after - at for at, after in itertools.pairwise([0, *steps])), default=0)
            return not steps or steps[-1] + gap > self.plan.steps

        return bool(self._losses["eval"]) and all(reaches([*known]) for known in self._losses.values())

    def add(self, found: Mapping[str, Any], *, is_new: bool) -> str | None:
        """Add what a log says of a step; return why the run has diverged, else None.

        ``is_new``: this attempt has printed it.

        Raises:
            UserError: the step is beyond the plan.
        """
        numbers, kind = dict(found), "eval" if "val_loss" in found else "train"
        at, tokens, samples = (numbers.pop(name, None) for name in ("step", "tokens", "samples"))
        if at is None:
            seen = tokens if samples is None else samples * self._training.seq_len
            at = seen / self.plan.tokens_per_step
        step, loss = round(at), numbers[_LOSS[kind]]
        if not math.isfinite(loss):
            return f"the {'validation' if kind == 'eval' else 'training'} loss at step {step} is {loss:g}"
        if step > self.plan.steps:
            raise UserError(
                f"the command's log has a row of step {step}; the plan ends after {self.plan.steps}",
                hint="training.tokens, seq_len and batch_size say how long it trains; {steps} tells it",
            )
        known, before = self._losses[kind], self._before[kind]
        if before.get(step, loss) != loss and step not in self.different:
            self.different.append(step)
        if step <= next(reversed(known), -1):
            return None
        known[step], self.is_new = loss, self.is_new or is_new
        step_ms, of_one = (numbers.pop(name, None) for name in ("step_ms", "tokens_per_sec_per_device"))
        if step_ms:
            numbers.setdefault("tokens_per_sec", self.plan.tokens_per_step * 1000 / step_ms)
        if of_one:
            numbers.setdefault("tokens_per_sec", of_one * self._devices)
        rest = {name: value for name, value in numbers.items() if math.isfinite(value)}
        self._on_row({"kind": kind, "tokens": step * self.plan.tokens_per_step, "step": step, **rest})
        most = self._training.divergence_evals
        latest = [*itertools.islice(reversed(self._losses["eval"].values()), most)]
        if len(latest) < most or min(latest) <= self._bound:
            return None
        return f"validation loss above {self._bound:.3g} nats/token for {most} evaluations"


class Text:
    """New lines of a text; a carriage return ends a line, too, as progress bars write it."""

    def __init__(self, path: Path) -> None:
        self.path, self._offset, self._rest = path, 0, b""

    def new(self, *, ended: bool = False) -> Iterator[str]:
        """Yield the lines without colours and outer blanks; ``ended``: an incomplete last line, too."""
        try:
            with self.path.open("rb") as file:
                if self.path.stat().st_size < self._offset:  # written anew
                    self._offset, self._rest = 0, b""
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return
        self._offset += len(content)
        *lines, self._rest = re.split(rb"[\r\n]", self._rest + content)
        if ended or len(self._rest) > _LONGEST_LINE:
            lines, self._rest = [*lines, self._rest], b""
        yield from (COLOURS.sub("", line.decode("utf-8", errors="replace")).strip() for line in lines)


class LogFiles:
    """What is new in the files at a place (a path or glob): lines of text, or other forms as JSON."""

    def __init__(self, source: LogSource, place: str) -> None:
        self._source, self._place = source, place
        self._texts: dict[Path, Text] = {}
        self._loaders: dict[Path, Any] = {}
        self._newest = 0.0

    def new(self, *, ended: bool = False) -> Iterator[str]:
        """Yield the lines; ``ended``: nothing more is written."""
        if self._source.tensorboard:
            yield from self._events()
        elif self._source.preset == "hf":
            written = max(((path.stat().st_mtime, path) for path in files_of(self._place)), default=None)
            if written and (ended or written[0] > self._newest):
                self._newest = written[0]
                yield written[1].read_text(encoding="utf-8")
        elif self._source.place:
            for path in files_of(self._place):
                yield from self._texts.setdefault(path, Text(path)).new(ended=ended)

    def _events(self) -> Iterator[str]:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.util import tensor_util

        tags = self._source.tensorboard.values()
        found: dict[int, dict[str, float]] = {}
        for path in files_of(f"{self._place}/**/events.out.tfevents.*"):
            for event in self._loaders.setdefault(path, EventFileLoader(str(path))).Load():
                for value in event.summary.value:
                    if value.tag in tags:
                        number = float(tensor_util.make_ndarray(value.tensor))
                        found.setdefault(event.step, {"step": event.step})[value.tag] = number
        yield from (json.dumps(found[step]) for step in sorted(found))
