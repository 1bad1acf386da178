"""MLPerf training logs: ``:::MLLOG`` JSON lines, with other text before, between and after them.

Read are the evaluations (``eval_accuracy``, by ``samples_count`` or ``epoch_num``), the run's status, seed,
hyper-parameters and throughput. Several ranks that log the same evaluation count once. What a run was trained
on is in the submission's system description, beside the results: the platform that a log names is free text,
equal for different devices in public logs, or the template's that nobody filled in.

How it fails: what does not parse is a line in the faults, and the rest goes on.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard

from ablate.base.errors import UserError, first_line
from ablate.base.files import parse_json
from ablate.reports.read.imported import PRECISION, ImportedRun, machine

if TYPE_CHECKING:
    from pathlib import Path

    from ablate.store import State

_MARK = b":::MLLOG"
_LARGEST = 1 << 62
_LATEST_MS = 1e14  # the year 5138
_SETTINGS = (
    "submission_benchmark", "global_batch_size", "max_sequence_length", "eval_samples", "train_samples",
    "init_checkpoint_step", "opt_name", "opt_base_learning_rate", "opt_end_learning_rate",
    "opt_learning_rate_warmup_steps", "opt_learning_rate_decay_steps", "opt_learning_rate_decay_schedule",
    "opt_adamw_beta_1", "opt_adamw_beta_2", "opt_adamw_epsilon", "opt_adamw_weight_decay",
    "opt_gradient_clip_norm", "target_accuracy", "submission_platform", *PRECISION,
)  # fmt: skip
_OLDER = {"lowest_numerical_precision_linear": "lowest_numerical_precision_in_linear"}
"""Keys that were called otherwise before."""
_UNFILLED = re.compile(r"(?:(\d+)x)?SUBMISSION_PLATFORM_PLACEHOLDER")
_WANTED = tuple(
    f'"{key}"'.encode()
    for key in (
        *_SETTINGS,
        *_OLDER,
        "submission_org",
        "eval_accuracy",
        "tracked_stats",
        "seed",
        "run_start",
        "run_stop",
    )
)


@dataclass
class _Log:
    """What was read so far."""

    settings: dict[str, Any] = field(default_factory=dict)
    evals: dict[int, float] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    """Samples per second, by the samples seen."""
    seed: int | None = None
    status: str | None = None
    started_ms: float | None = None
    stopped_ms: float | None = None


def read_mllog(path: Path, *, tokens_per_sample: int | None = None) -> tuple[ImportedRun | None, list[str]]:
    """Read one result file.

    Args:
        path: the file.
        tokens_per_sample: tokens that a sample counts; default: the log's ``max_sequence_length``.

    Returns:
        The run (None where there is none in the file) and the faults, each with file and line.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        return None, [f"{path}: cannot be read: {error.strerror or error}"]
    faults: list[str] = []
    log = _Log()
    for number, record in _records(path, content, faults):
        _take(log, record, f"{path}:{number}", faults)
    if not log.evals:
        return None, [
            *faults,
            f"{path}: no evaluation in it (expected {_MARK.decode()} lines with eval_accuracy)",
        ]
    per_sample = tokens_per_sample or log.settings.get("max_sequence_length")
    if not isinstance(per_sample, int) or isinstance(per_sample, bool) or not 0 < per_sample < _LARGEST:
        return None, [*faults, f"{path}: the length of a sample is not in it: give --tokens-per-sample"]
    state, message = _ending(log)
    if state == "interrupted":
        faults.append(f"{path}: {message}: no result")
    # The size of the data set; one submitter logs what the run took under that name, which is no setting.
    settings = {key: log.settings[key] for key in _SETTINGS if key in log.settings}
    train_samples = settings.get("train_samples")
    if _is_count(train_samples) and train_samples <= 1.05 * max(log.evals):
        del settings["train_samples"]
    platform = settings.pop("submission_platform", None)
    told = {} if platform is None else {"submission_platform": platform}
    if isinstance(platform, str) and (unfilled := _UNFILLED.fullmatch(platform)):
        platform = "not named (the template's text was left in its place)"
        told = {"number_of_nodes": int(unfilled[1])} if unfilled[1] else {}
    organisation = log.settings.get("submission_org")
    if (trained_on := _hardware(path, faults)) is not None:
        told = {"hardware": trained_on}
    settings |= told
    run = ImportedRun(
        source=str(path),
        content=content,
        seed=log.seed,
        evals=tuple((at * per_sample, loss) for at, loss in sorted(log.evals.items()) if math.isfinite(loss)),
        state=state,
        message=message,
        throughput=tuple((at * per_sample, rate * per_sample) for at, rate in sorted(log.rates.items())),
        settings=settings,
        started_unix=None if log.started_ms is None else log.started_ms / 1e3,
        ended_unix=None if log.stopped_ms is None else log.stopped_ms / 1e3,
        environment={
            "platform": platform,
            "organisation": None if organisation == "SUBMISSION_ORG_PLACEHOLDER" else organisation,
        },
    )
    return run, faults


def _hardware(path: Path, faults: list[str]) -> str | None:
    """Return ``8x NVIDIA H100`` from the description of a submission's system, None where there is none.

    It stands as ``ORG/systems/SYSTEM.json`` beside ``ORG/results/SYSTEM/BENCHMARK/result_0.txt``.
    """
    folders = path.resolve().parents
    if len(folders) < 4:
        return None
    file = folders[3] / "systems" / f"{folders[1].name}.json"
    try:
        told = parse_json(file.read_bytes())
        nodes, each = (int(told[key]) for key in ("number_of_nodes", "accelerators_per_node"))
        hardware = f"{nodes * each}x {' '.join(str(told['accelerator_model_name']).split())}"
        machine(hardware)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, UserError) as error:
        faults.append(f"{file}: it does not tell the accelerators and their number: {first_line(error)}")
        return None
    return hardware


def _records(path: Path, content: bytes, faults: list[str]) -> list[tuple[int, dict[str, Any]]]:
    """Return the wanted records with their line numbers; the rest of the text is only searched."""
    found = []
    at = line = 0
    counted = 0
    while (at := content.find(_MARK, at)) >= 0:
        end = content.find(b"\n", at)
        end = len(content) if end < 0 else end
        text = content[at + len(_MARK) : end]
        if any(word in text for word in _WANTED):
            line += content.count(b"\n", counted, at)
            counted = at
            try:
                record = parse_json(text)
            except ValueError as error:
                what = "cut off in the middle" if end == len(content) else f"not JSON: {error}"
                faults.append(f"{path}:{line + 1}: {what}")
            else:
                if isinstance(record, dict):
                    found.append((line + 1, record))
                else:
                    faults.append(f"{path}:{line + 1}: not a JSON object")
        at = end
    return found


def _take(log: _Log, record: dict[str, Any], where: str, faults: list[str]) -> None:
    key, value, meta = record.get("key"), record.get("value"), record.get("metadata")
    meta = meta if isinstance(meta, dict) else {}
    if key == "eval_accuracy":
        samples = meta.get("samples_count", meta.get("epoch_num"))
        if not _is_count(samples) or not _is_number(value):
            faults.append(f"{where}: an evaluation needs a number, and samples_count or epoch_num")
        elif repr(log.evals.setdefault(int(samples), float(value))) != repr(float(value)):
            faults.append(
                f"{where}: another loss ({value}) at {int(samples)} samples, where {log.evals[int(samples)]} "
                "was logged before: the first counts"
            )
    elif key == "tracked_stats" and isinstance(value, dict):
        _take_rate(log, value, meta)
    elif key == "seed" and _is_number(value) and isinstance(value, int):
        log.seed = value if log.seed is None else log.seed
    elif key in ("run_start", "run_stop"):
        if key == "run_stop":
            log.status = str(meta.get("status", "success"))
        time_ms = record.get("time_ms")
        if _is_count(time_ms) and time_ms < _LATEST_MS:
            setattr(log, "started_ms" if key == "run_start" else "stopped_ms", time_ms)
    elif isinstance(key, str) and value not in ("", None):
        key = _OLDER.get(key, key)
        if key in _SETTINGS or key == "submission_org":
            log.settings.setdefault(key, value)


def _ending(log: _Log) -> tuple[State, str | None]:
    """Return the state: a run that was given up counts as far as it came, one that only stops does not."""
    if log.status is None:
        return "interrupted", "the log ends without run_stop"
    if log.status == "success":
        return "finished", None
    if any(not math.isfinite(loss) for loss in log.evals.values()):
        return "diverged", f"logged as {log.status}, with a loss that is not finite"
    return "finished", f"logged as {log.status}"


def _take_rate(log: _Log, value: dict[str, Any], meta: dict[str, Any]) -> None:
    """Note the samples per second of some steps, logged as such or as seconds of a step."""
    samples = meta.get("samples_count", meta.get("step"))
    seconds, batch = value.get("train_step_time"), log.settings.get("global_batch_size")
    rate = value.get("throughput")
    if rate is None and _is_count(seconds) and _is_count(batch) and seconds > 0:
        rate = batch / seconds
    if _is_count(samples) and _is_count(rate):
        log.rates[int(samples)] = float(rate)


def _is_number(value: object) -> TypeGuard[float]:
    """Tell whether a value is a number that a float can hold, NaN and infinity among them."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < _LARGEST
    return isinstance(value, float)


def _is_count(value: object) -> TypeGuard[float]:
    return _is_number(value) and 0 <= value < _LARGEST
