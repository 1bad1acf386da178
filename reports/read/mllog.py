"""MLPerf training logs: ``:::MLLOG`` JSON lines, with other text before, between and after them.

The importer reads the evaluations (``eval_accuracy``, by ``samples_count`` or ``epoch_num``), the run's
status, seed, hyper-parameters and throughput. An evaluation that several ranks log counts once. The hardware
is read from the submission's system description, beside the results: the platform in a log is free text,
which in public logs is the same for different devices or still the template's placeholder.

How it fails: a line that does not parse is a line in the faults, and the rest is read.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeGuard

from ablate.base.errors import UserError, first_line
from ablate.base.files import parse_json
from ablate.reports.read.imported import PRECISION, ImportedRun, machine
from ablate.run.log_rows import LARGEST, LogReader, LogSource
from ablate.run.log_text import read_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from ablate.store import State

_MARK = b":::MLLOG"
_LATEST_MS = 1e14  # the year 5138
_SETTINGS = (
    "submission_benchmark", "global_batch_size", "max_sequence_length", "eval_samples",
    "init_checkpoint_step", "opt_name", "opt_base_learning_rate", "opt_end_learning_rate",
    "opt_learning_rate_warmup_steps", "opt_learning_rate_decay_steps", "opt_learning_rate_decay_schedule",
    "opt_adamw_beta_1", "opt_adamw_beta_2", "opt_adamw_epsilon", "opt_adamw_weight_decay",
    "opt_gradient_clip_norm", "target_accuracy", "submission_platform", *PRECISION,
)  # fmt: skip
_SAMPLE_TOKENS = {
    "gpt3": 2048, "llama2_70b_lora": 8192, "llama31_405b": 8192, "llama31_8b": 8192,
}  # fmt: skip
"""The length of a sample that MLPerf Training's rules fix for a benchmark (training_rules, v5.1)."""
_OLDER = {"lowest_numerical_precision_linear": "lowest_numerical_precision_in_linear"}
"""Keys of older logs, and their names now."""
_WANTED = tuple(
    f'"{key}"'.encode()
    for key in (
        *_SETTINGS, *_OLDER, "submission_org", "eval_accuracy", "tracked_stats", "seed", "run_start",
        "run_stop",
    )
)  # fmt: skip


def read_mllog(
    path: Path, faults: list[str], *, tokens_per_sample: int | None = None
) -> ImportedRun | None:
    """Read the run in one result file; None if the file holds no usable run.

    Args:
        path: the file.
        faults: gets a line for each fault, with file and line.
        tokens_per_sample: default: the log's ``max_sequence_length``.

    Raises:
        OSError: the file cannot be read.
        UserError: nothing tells the length of a sample.
    """
    content = read_bytes(path)
    log = _Log()
    for place, record in _records(path, content, faults):
        fault = log.add(record)
        if fault is not None:
            faults.append(f"{place}: {fault}")
    if not log.losses:
        faults.append(
            f"{path}: no evaluation in it (expected {_MARK.decode()} lines with eval_accuracy)"
        )
        return None
    settings = {key: log.settings[key] for key in _SETTINGS if key in log.settings}
    benchmark = str(settings.get("submission_benchmark"))
    length = settings.get("max_sequence_length", _SAMPLE_TOKENS.get(benchmark))
    per_sample = tokens_per_sample or length
    if type(per_sample) is not int or not 0 < per_sample < LARGEST:
        raise UserError(
            f"{path}: the length of a sample is not in it: give --tokens-per-sample"
        )
    state, message = log.end()
    if state == "interrupted":
        faults.append(f"{path}: {message}: no result")
    platform = settings.get("submission_platform")
    hardware = _hardware(path, faults)
    if hardware is not None:
        settings["hardware"] = hardware
    if hardware is not None or "SUBMISSION_PLATFORM_PLACEHOLDER" in str(platform):
        settings.pop("submission_platform", None)
    evals = []
    for samples, loss in sorted(log.losses.items()):
        if math.isfinite(loss):
            evals.append((samples * per_sample, loss))
    throughput = []
    for samples, rate in sorted(log.rates.items()):
        throughput.append((samples * per_sample, rate * per_sample))
    return ImportedRun(
        source=str(path),
        content=content,
        seed=log.seed,
        evals=tuple(evals),
        state=state,
        message=message,
        throughput=tuple(throughput),
        settings=settings,
        started_unix=log.times.get("run_start"),
        ended_unix=log.times.get("run_stop"),
        environment={
            "platform": platform,
            "organisation": log.settings.get("submission_org"),
        },
    )


class _Log:
    """What the records of a log say. ``losses`` and ``rates`` (samples per second): by the samples seen."""

    def __init__(self) -> None:
        self._reader = LogReader(LogSource(preset="mllog"))
        self._status: str | None = None
        self.settings: dict[str, Any] = {}
        self.losses: dict[int, float] = {}
        self.rates: dict[int, float] = {}
        self.times: dict[str, float] = {}
        self.seed: int | None = None

    def add(self, record: Mapping[str, Any]) -> str | None:
        """Add a record; return what is wrong with it."""
        key = record.get("key")
        value = record.get("value")
        metadata = record.get("metadata")
        if not isinstance(metadata, dict):
            metadata = {}
        if key == "eval_accuracy":
            return self._add_evaluation(record)
        if key == "tracked_stats" and isinstance(value, dict):
            samples = metadata.get("samples_count", metadata.get("step"))
            rate = value.get("throughput")
            step_time = value.get("train_step_time")
            batch = self.settings.get("global_batch_size")
            if rate is None and _is_count(step_time) and _is_count(batch) and step_time:
                rate = batch / step_time
            if _is_count(samples) and _is_count(rate):
                self.rates[int(samples)] = float(rate)
        elif key == "seed" and type(value) is int and abs(value) < LARGEST:
            self.seed = value if self.seed is None else self.seed
        elif key in ("run_start", "run_stop"):
            if key == "run_stop":
                self._status = str(metadata.get("status", "success"))
            time_ms = record.get("time_ms")
            if _is_count(time_ms) and time_ms < _LATEST_MS:
                self.times[key] = time_ms / 1e3
        elif isinstance(key, str) and value not in ("", None):
            self.settings.setdefault(_OLDER.get(key, key), value)
        return None

    def _add_evaluation(self, record: Mapping[str, Any]) -> str | None:
        row = next(self._reader.rows_of(record), {})
        if "val_loss" not in row or "samples" not in row:
            return "an evaluation needs a number, and samples_count or epoch_num"
        samples = int(row["samples"])
        first = self.losses.setdefault(samples, row["val_loss"])
        if repr(first) == repr(row["val_loss"]):
            return None
        return (
            f"another loss ({record['value']}) at {samples} samples, where {first} was logged before: the "
            "first counts"
        )

    def end(self) -> tuple[State, str | None]:
        """Return how the run ended, and what is to be said of it.

        An aborted run counts up to its end; a run whose log breaks off does not count.
        """
        if self._status is None:
            return "interrupted", "the log ends without run_stop"
        if self._status == "success":
            return "finished", None
        message = f"logged as {self._status}"
        if all(map(math.isfinite, self.losses.values())):
            return "finished", message
        return "diverged", f"{message}, with a loss that is not finite"


def _hardware(path: Path, faults: list[str]) -> str | None:
    """Read ``8x NVIDIA H100`` from the description of a submission's system; None without one.

    For ``ORG/results/SYSTEM/BENCHMARK/result_0.txt`` it is ``ORG/systems/SYSTEM.json``.
    """
    system = path.resolve().parent.parent
    file = system.parent.parent / "systems" / f"{system.name}.json"
    try:
        description = parse_json(file.read_bytes())
        nodes = int(description["number_of_nodes"])
        count = nodes * int(description["accelerators_per_node"])
        name = " ".join(str(description["accelerator_model_name"]).split())
        machine(f"{count}x {name}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, UserError) as error:
        faults.append(
            f"{file}: it does not tell the accelerators and their number: {first_line(error)}"
        )
        return None
    return f"{count}x {name}"


def _records(
    path: Path, content: bytes, faults: list[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the wanted records, each with ``path:line``; other lines are not parsed."""
    lines = content.split(b"\n")
    for line_number, line in enumerate(lines, 1):
        text = line.partition(_MARK)[2]
        if not any(key in text for key in _WANTED):
            continue
        place = f"{path}:{line_number}"
        try:
            record = parse_json(text)
        except ValueError as error:
            fault = f"not JSON: {error}"
            if line_number == len(lines):
                fault = "cut off in the middle"
            faults.append(f"{place}: {fault}")
            continue
        if isinstance(record, dict):
            yield place, record
        else:
            faults.append(f"{place}: not a JSON object")


def _is_count(value: object) -> TypeGuard[float]:
    """Tell whether a value is a number from 0 on, below 2⁶²."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 <= value < LARGEST
    )
