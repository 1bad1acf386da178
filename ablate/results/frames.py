"""Run store → data frames, so that later steps need not know of files.

How it fails: a file that does not parse never stops a report. Each fault becomes one line in ``faults``, and
the rest is read. A damaged run gives no numbers; a run without a result gives those
up to its newest checkpoint. A last line that a crash cut is no fault.
A missing plan is an error of the caller (``FileNotFoundError``).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pandas as pd

from ablate.base.files import read_record
from ablate.store import END_STATES
from ablate.store.metrics import lines_of, number_in, rows_of
from ablate.store.records import (
    Environment,
    RecordedConfig,
    SpeedRecord,
    checked,
    with_whole,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ablate.store import Status, StudyStore
    from ablate.store.plan_file import LockedPlan

Record = TypeVar("Record")
_SAMPLES = 200
TRAINING = {
    "tokens": "tokens", "step": "step", "loss": "loss_nats_per_token", "lr": "learning_rate",
    "grad_norm": "gradient_norm", "tokens_per_sec": "tokens_per_sec",
}  # fmt: skip
"""Keys of a training row in ``metrics.jsonl``, and the names of their columns."""

_OF_RUN = ["run_id", "arm", "seed"]
BF16_LOSS = "val_loss_bf16"
"""The column of the evaluations in bf16."""


class StudyRun(NamedTuple):
    """A run of the plan: its status, its budget in tokens, and the median tokens/s of its training."""

    arm: str
    seed: int
    status: Status
    budget: int | None
    tokens_per_sec: float | None

    @property
    def has_result(self) -> bool:
        """Whether it has come to its end, or diverged."""
        return self.status.state in ("finished", "diverged")


@dataclass(frozen=True, kw_only=True)
class StudyFrames:
    """A study as plain data.

    ``runs`` has every run of the plan by id, ``evals`` a row for each evaluation (ordered by run and
    tokens, each token count once). If any run was also evaluated in bf16, there is a column
    ``val_loss_bf16``, NaN for evaluations without it. ``configs`` maps an arm to the resolved
    configuration of its first run that has one; ``environments`` maps a run id to what it ran on.
    ``throughput``: what ``ablate check steps STUDY`` measured.
    """

    plan: LockedPlan
    runs: dict[str, StudyRun]
    evals: pd.DataFrame
    configs: dict[str, RecordedConfig]
    environments: dict[str, Environment]
    throughput: SpeedRecord | None
    faults: tuple[str, ...]


def load_frames(store: StudyStore) -> StudyFrames:
    """Read a study's run store.

    Raises:
        FileNotFoundError: the study never ran here.
        UserError: the plan cannot be read.
    """
    plan = store.plan()
    faults: list[str] = []
    runs: dict[str, StudyRun] = {}
    evals = []
    configs: dict[str, RecordedConfig] = {}
    environments: dict[str, Environment] = {}
    for arm, entry in plan.runs():
        run = store.run(entry.id)
        status = run.examined()
        config = None
        content = b""
        if status.state == "damaged":
            faults.append(f"{run.path}: {status.message}")
        else:
            config = _read(run.config_path, partial(with_whole, RecordedConfig), faults)
            environment = _read(
                run.environment_path, partial(with_whole, Environment), faults
            )
            content, damage = run.rows(run.metrics_path, status)
            faults += damage
            is_open = content and status.state not in END_STATES
            if is_open and not run.environment_path.exists():
                faults.append(f"{run.environment_path} is gone")
            if config and config.whole:
                configs.setdefault(arm.name, config)
            if environment and environment.whole:
                environments[entry.id] = environment
        lines = lines_of(content)
        # Tuples: a large study has a million rows, and dicts would take more memory.
        evals += [(entry.id, arm.name, entry.seed, *row) for row in _evaluations(lines)]
        training = (config and config.training) or plan.training
        forked = arm.fork.tokens if arm.fork else 0
        runs[entry.id] = StudyRun(
            arm=arm.name,
            seed=entry.seed,
            status=status,
            budget=training.get("tokens"),
            tokens_per_sec=_throughput(lines, forked),
        )
    frame = pd.DataFrame(
        evals, columns=[*_OF_RUN, "tokens", "step", "val_loss", BF16_LOSS]
    )
    if frame[BF16_LOSS].notna().any():
        frame = frame.astype({BF16_LOSS: float})
    else:
        frame = frame.drop(columns=BF16_LOSS)
    return StudyFrames(
        plan=plan,
        runs=runs,
        evals=frame,
        configs=configs,
        environments=environments,
        throughput=_read(store.throughput_path, partial(checked, SpeedRecord), faults),
        faults=tuple(faults),
    )


def training_frame(store: StudyStore) -> pd.DataFrame:
    """Read the training rows of all runs of the plan, by run and tokens, without damaged ones.

    The columns are those of ``TRAINING`` after ``run_id``, ``arm`` and ``seed``. Where validation losses are
    not in nats per token, the unit of those in training is not known, and their column is ``loss``.
    """
    plan = store.plan()
    rows = []
    for arm, entry in plan.runs():
        run = store.run(entry.id)
        content, _ = run.rows(run.metrics_path, run.examined())
        train_rows = {row["tokens"]: row for row in rows_of(lines_of(content), "train")}
        for tokens in sorted(train_rows):
            of_run = {"run_id": entry.id, "arm": arm.name, "seed": entry.seed}
            rows.append(of_run | training_row(train_rows[tokens]))
    frame = pd.DataFrame(rows, columns=[*_OF_RUN, *TRAINING.values()])
    if plan.loss_unit == "nats":
        return frame
    return frame.rename(columns={TRAINING["loss"]: "loss"})


def training_row(row: dict[str, Any]) -> dict[str, Any]:
    """Rename the keys of a training row to those of ``TRAINING``; missing values are None."""
    return {name: row.get(key) for key, name in TRAINING.items()}


def _read(
    path: Path, parse: Callable[[object], Record], faults: list[str]
) -> Record | None:
    """Read a JSON file; None if it is absent or damaged. Only damage is a fault."""
    try:
        return parse(read_record(path))
    except FileNotFoundError:
        return None
    except ValueError as error:
        faults.append(f"{path}: {error}")
        return None


def _evaluations(lines: list[bytes]) -> list[tuple[float | None, ...]]:
    """Return tokens, step, loss and loss in bf16 of each evaluation with a finite loss, by tokens."""
    evaluations = {}
    for row in rows_of(lines, "eval"):
        tokens = row["tokens"]
        loss = number_in(row, "val_loss")
        if loss is not None:
            in_bf16 = number_in(row, BF16_LOSS)
            # After a resume from an older checkpoint an evaluation is written twice: the last one counts.
            evaluations[tokens] = (tokens, row.get("step", 0), loss, in_bf16)
    return [evaluations[tokens] for tokens in sorted(evaluations)]


def _throughput(lines: list[bytes], forked: int) -> float | None:
    """Return the median tokens/s of training after the first ``forked`` tokens, which another arm trained.

    The rows are many: of those that have a speed only a sample is parsed.
    """
    lines = [line for line in lines if b'"tokens_per_sec"' in line]
    speeds = []
    for row in rows_of(lines[:: max(1, len(lines) // _SAMPLES)], "train"):
        speed = number_in(row, "tokens_per_sec")
        if row["tokens"] > forked and speed is not None:
            speeds.append(speed)
    return statistics.median(speeds) if speeds else None
