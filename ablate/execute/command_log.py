"""The rows of a command's run, from what it says over all its attempts.

The rows that earlier attempts have written stand. A resumed command repeats some steps: rows that agree are
dropped, and of those that differ the first stands and the step is named.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from ablate.base.errors import UserError
from ablate.run.command import Command
from ablate.run.evaluations import Places, Repeats, named, place_of
from ablate.run.log_formats import VALUES
from ablate.run.log_rows import is_nan
from ablate.run.loss_units import short_name, stored_unit, to_stored
from ablate.run.schedule import divergence_bound, plan_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ablate.run.config import RunConfig

_LOSS = {"train": "loss", "eval": "val_loss"}
_WORDS = {"train": "training", "eval": "validation"}


class Rows:
    """The rows of a run over all its attempts. ``before``: those of earlier attempts."""

    def __init__(
        self,
        config: RunConfig,
        before: Iterable[Mapping[str, Any]],
        on_row: Callable[[dict[str, Any]], None],
        num_devices: int,
    ) -> None:
        assert isinstance(config.trainer, Command)
        assert config.trainer.metrics is not None
        self.plan = plan_steps(config.training)
        self._source = config.trainer.metrics
        self._training = config.training
        self._num_devices = num_devices
        self._on_row = on_row
        self._bound = divergence_bound(
            config.training.divergence_loss, config.vocab_size
        )
        self._places = Places(
            lambda step: step * self.plan.tokens_per_step, config.training.seq_len
        )
        self._repeats = Repeats(self._source.evaluations)
        self._is_fresh = False
        self._sets: dict[str, None] = {}
        self._losses: dict[str, dict[int, float]] = {"train": {}, "eval": {}}
        self._tokens: dict[str, list[int]] = {"train": [0], "eval": [0]}
        self._losses_before: dict[str, dict[int, float]] = {"train": {}, "eval": {}}
        for row in before:
            kind = row["kind"]
            loss = row[_LOSS[kind]]
            self._losses[kind][row["step"]] = loss
            self._losses_before[kind][row["step"]] = loss
            self._tokens[kind].append(row["tokens"])
            self._places.learn(row)
            if kind == "eval":
                self._repeats.is_evaluation(row["step"], loss, is_fresh=True)
        self.is_new = False
        self.different: set[int] = set()

    @property
    def last(self) -> int:
        """The step of the last row, 0 without one."""
        return max(map(self.last_of, self._losses))

    @property
    def tokens(self) -> int:
        """The tokens at the last row, 0 without one."""
        return max(tokens[-1] for tokens in self._tokens.values())

    @property
    def has_evaluations(self) -> bool:
        """Whether an evaluation was read."""
        return bool(self._losses["eval"])

    def missing(self) -> str | None:
        """Say which row a run lacks whose command has ended, None if it is complete.

        It is complete if its last evaluation is at the plan's end or less than an interval of training rows
        before it, or if its loop would print the next row of each kind after that end.
        """
        last_interval = _widest_gap(self._tokens["train"])
        last_evaluation = self._tokens["eval"][-1]
        if self.has_evaluations and last_evaluation + last_interval >= self.plan.tokens:
            return None
        if self._losses["train"] and not self.reaches_end("train"):
            return f"without a training row after step {self.last_of('train')}"
        if self.reaches_end("eval"):
            return None
        last = self.last_of("eval")
        return f"without an evaluation after step {last} (let it evaluate at its last step)"

    def reaches_end(self, kind: str) -> bool:
        """Whether the next row of this kind would come after the plan's end."""
        tokens = self._tokens[kind]
        next_tokens = tokens[-1] + _widest_gap(tokens)
        # a loop with a training row of step 0 ends before the step of the plan's end
        counts_from_zero = 0 in self._losses["train"]
        return next_tokens + counts_from_zero > self.plan.tokens

    def last_of(self, kind: str) -> int:
        """Return the step of the last row of a kind, 0 without one."""
        return next(reversed(self._losses[kind]), 0)

    def notes(self) -> Iterator[str]:
        """Yield where the log's own count differs from steps × batch, and what its end lacks."""
        if disagreement := self._places.disagreement():
            yield disagreement
        last = self.last_of("eval")
        if last < self.plan.steps and not self.missing():
            note = f"the last evaluation is of step {last:,} of {self.plan.steps:,}"
            if 0 in self._losses["train"]:
                note += (
                    ", counted from 0: where it evaluates after the update, evaluations have "
                    f"{self.plan.tokens_per_step:,} tokens (one step) more than stated"
                )
            yield note

    def add(self, printed: Mapping[str, Any], *, is_new: bool) -> str | None:
        """Add what a log says of a step; return why the run has diverged, else None.

        ``is_new``: this attempt has printed it.

        Raises:
            UserError: the step is beyond the plan, or there are several evaluation sets.
        """
        row = dict(printed)
        self._places.learn(row)
        self._check_sets(row)
        kind = self._kind(row)
        if kind is None:
            if "loss" not in row and is_nan(row.get("grad_norm")):
                return f"the gradient norm at {named(row)} is nan, without a loss"
            return None
        tokens = round(self._places.tokens(row))
        if "step" in row:
            step = round(row["step"])
        else:
            step = round(tokens / self.plan.tokens_per_step)
        loss = row[_LOSS[kind]]
        if not math.isfinite(loss):
            return f"the {_WORDS[kind]} loss at step {step} is {loss:g}"
        if kind == "eval":
            loss = row["val_loss"] = to_stored(loss, self._source.loss_unit)
        if tokens >= self.plan.tokens + self.plan.tokens_per_step:
            raise UserError(
                f"the command's log has a row of step {step}; the plan ends after {self.plan.steps} "
                f"({tokens:,} tokens there, {self.plan.tokens:,} planned)",
                hint="training.tokens, seq_len and batch_size say how long it trains; {steps} tells it",
            )
        losses = self._losses[kind]
        if self._losses_before[kind].get(step, loss) != loss:
            self.different.add(step)
        if step <= next(reversed(losses), -1):
            return None
        losses[step] = loss
        self._tokens[kind].append(tokens)
        self.is_new = self.is_new or is_new
        place = {"kind": kind, "tokens": tokens, "step": step}
        self._on_row(place | self._values(row))
        count = self._training.divergence_evals
        latest = [*self._losses["eval"].values()][-count:]
        if len(latest) < count or min(latest) <= self._bound:
            return None
        unit = short_name(stored_unit(self._source.loss_unit))
        return f"validation loss above {self._bound:.3g} {unit} for {count} evaluations"

    def _check_sets(self, row: dict[str, Any]) -> None:
        name = row.pop("set", None)
        if name is None or "val_loss" not in row or self._source.set is not None:
            return
        self._sets[name] = None
        if len(self._sets) > 1:
            raise UserError(
                f"the command evaluates on several sets: {', '.join(self._sets)}",
                hint=f"name the one that counts: metrics: {{set: {next(iter(self._sets))}}}",
            )

    def _kind(self, row: dict[str, Any]) -> str | None:
        """Return whether a row is an evaluation or one of training, whose ``val_loss`` is then left out."""
        if "val_loss" not in row:
            self._is_fresh = self._is_fresh or "loss" in row
            return "train" if "loss" in row else None
        loss = row["val_loss"]
        is_training = math.isfinite(row.get("loss", math.nan))
        if is_nan(loss) and is_training:  # a blank
            self._is_fresh = True
            is_evaluation = False
        else:
            is_evaluation = self._repeats.is_evaluation(
                place_of(row), loss, is_fresh=self._is_fresh
            )
            self._is_fresh = False
        if is_evaluation:
            return "eval"
        del row["val_loss"]
        return "train" if is_training else None

    def _values(self, row: dict[str, Any]) -> dict[str, float]:
        """Return what a row of metrics holds beside its place."""
        values = {
            name: row[name] for name in VALUES if math.isfinite(row.get(name, math.nan))
        }
        if per_device := values.pop("tokens_per_sec_per_device", None):
            rate = per_device * self._num_devices
        if step_ms := values.pop("step_ms", None):
            rate = self.plan.tokens_per_step * 1000 / step_ms
        if step_ms or per_device:
            values.setdefault("tokens_per_sec", rate)
        return values


def _widest_gap(tokens: Sequence[int]) -> int:
    return max(
        (after - before for before, after in itertools.pairwise(tokens)), default=0
    )
