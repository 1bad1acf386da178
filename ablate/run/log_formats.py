"""The logs of known trainers, each declared once: ``FORMATS``.

``ablate import``, the ``metrics`` of a command and ``ablate init --log`` read every format, and the docs list
them from here. A new format is one entry, with its lines in ``tests/run/logs.txt``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ablate.run.loss_units import LoggedUnit

PLACES = ("step", "tokens", "samples")
"""Where in the training a row is; ``samples`` are sequences."""
VALUES = (
    "val_loss",
    "loss",
    "grad_norm",
    "lr",
    "step_ms",
    "tokens_per_sec",
    "tokens_per_sec_per_device",
)
"""What a row may tell; ``step_ms``: milliseconds for an optimizer step."""
ROW = (*PLACES, *VALUES, "seconds", "ms", "seed", "run", "set")
"""The names of a row. ``seconds``, ``ms``: since training began. ``set``: the name of the evaluation set."""

Form = Literal["lines", "json lines", "json", "csv", "events"]
"""How a file holds its rows; ``events``: a folder of TensorBoard's event files."""
_NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?(?![_.,]?\d)|(?i:nan|inf(?:inity)?))"
_NO_NUMBER = r"(?:nan|NaN|NAN|inf|Inf|INF)"
DIVERGED = (
    # Megatron-LM; scripts of one's own (two lines); Lightning 2.6.6, loops/utilities.py; DeepSpeed's loss
    # scaler. Each begins with plain letters, which Python finds quickly.
    rf"ound {_NO_NUMBER} in (?:local|the) ",
    rf"oss (?:is|was|became)[: ]+{_NO_NUMBER}\b(?!.*skip)",
    r"on-finite (?:train\w* |validation )?loss",
    rf"The loss returned in `\w+` is (?:tensor\()?{_NO_NUMBER}",
    r"Current loss scale already at minimum",
)
"""What trainers print of a divergence before they end."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a log is read.

    ``about``: what writes it. ``read_in``: the version in which its lines were read. ``patterns``: regular
    expressions of lines, whose groups are named as in ``ROW``. ``keys``: of the other forms: our name → their
    keys, of which the first that is there counts; ``*`` in a key stands for the name of an evaluation set.
    ``only``: a key, and its value in the entries that are read. ``files``: names that are searched for in a
    folder. ``unit``: of its validation losses (``ablate.run.loss_units``). ``repeats``: whether each training
    row shows the last evaluation again.
    """

    about: str = ""
    read_in: str = ""
    form: Form = "lines"
    patterns: tuple[str, ...] = ()
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    only: tuple[str, str] | None = None
    files: tuple[str, ...] = ("*.log", "*.out", "*.txt")
    unit: LoggedUnit = "nats"
    repeats: bool = False


def _patterns(*templates: str) -> tuple[str, ...]:
    """Return the patterns of templates, in which ``<name>`` stands for a number of that name."""
    return tuple(
        re.sub(r"(?<!\?P)<(\w+)>", lambda match: f"(?P<{match[1]}>{_NUMBER})", template)
        for template in templates
    )


FORMATS: dict[str, Format] = {
    "megatron": Format(
        about="Megatron-LM, Megatron-Bridge, Primus",
        read_in="Megatron-LM d98e8a64 (August 2026), training.py",
        patterns=_patterns(
            r"iteration\s+<step>/\s*\d+ \|(?:\s*consumed samples:\s*<samples> \|)?"
            r".*?elapsed time per iteration \(ms\): <step_ms>.*?learning rate: <lr>"
            r"(?:.*?lm loss: <loss>)?(?:.*?grad norm: <grad_norm>)?",
            # The last rank prints evaluations; the one on the test set at the end is not read.
            r"(?P<set>validation(?:-\w+)?) loss at iteration <step>(?: on validation set)? \|"
            r" lm loss value: <val_loss>",
        ),
    ),
    "torchtitan": Format(
        about="torchtitan",
        read_in="torchtitan b5bcd76c (2026), components/metrics.py",
        patterns=_patterns(
            # ``tps`` is of one device.
            r"(?<!validate )step:\s*<step>\s+loss:\s*<loss>\s+grad_norm:\s*<grad_norm>"
            r".*?tps:\s*<tokens_per_sec_per_device>",
            r"validate step:\s*<step>\s+loss:\s*<val_loss>",
        ),
    ),
    "nanogpt": Format(
        about="nanoGPT and modded-nanogpt",
        read_in="nanoGPT 005475c4, train.py; modded-nanogpt f411b3d3 (2026), train_gpt.py",
        patterns=_patterns(
            r"^step <step>: train loss <loss>, val loss <val_loss>",
            r"^iter <step>: loss <loss>, time <step_ms>ms",
            # ``step_avg`` is the mean since the beginning.
            r"step:<step>/\d+ val_loss:<val_loss> .*?step_avg:<step_ms>ms",
        ),
    ),
    "nanochat": Format(
        about="nanochat",
        read_in="nanochat 92d63d4 (2026), scripts/base_train.py",
        patterns=_patterns(
            r"Step <step> \| Validation bpb: <val_loss>",
            r"step <step>/\d+ .*?\| loss: <loss> .*?\| dt: <step_ms>ms \| tok/sec: <tokens_per_sec>",
        ),
        unit="bits-per-byte",
    ),
    "nemo": Format(
        about="NeMo",
        read_in="NeMo 01f7dbc5, lightning/pytorch/callbacks/progress_printer.py",
        # With a log interval above 1 it prints means over the interval, of consumed_samples, too.
        patterns=_patterns(
            r"global_step[:=] ?<step>(?=.*?reduced_train_loss[:=] ?<loss>)?"
            r"(?=.*?consumed_samples[:=] ?<samples>)?(?=.*?\bval_loss[:=] ?<val_loss>)?"
        ),
        repeats=True,
    ),
    "litgpt": Format(
        about="LitGPT",
        read_in="LitGPT 03630609, litgpt/pretrain.py",
        # An evaluation also has a line of its own, which counts micro-batches, not steps: it is not read.
        patterns=_patterns(
            r"\biter \d+ step <step> \| loss train: <loss>, val: (?:<val_loss>|n/a)"
            r"(?:.*?iter time: <step_ms> ms \(step\))?"
        ),
        repeats=True,
    ),
    "olmo": Format(
        about="OLMo and OLMo-core",
        read_in="OLMo-core fa6c5014 (2026), console_logger.py",
        patterns=_patterns(
            r"\[step=<step>/",
            r"train/(?:CE loss|CrossEntropyLoss)=<loss>",
            r"eval/(?P<set>\S.*?)/(?:CE loss|CrossEntropyLoss)=<val_loss>",
            r"throughput/total[_ ]tokens=<tokens>",
            r"optim/total[_ ]grad[_ ]norm=<grad_norm>",
        ),
    ),
    "mllog": Format(
        about="MLPerf's logging: lines with :::MLLOG",
        read_in="MLPerf Training v5.1 (2025)",
        form="json lines",
        keys={"val_loss": ("value",), "samples": ("metadata.samples_count", "metadata.epoch_num")},
        only=("key", "eval_accuracy"),
        files=("result*.txt", "*.log", "*.out"),
    ),
    "hf": Format(
        about="Hugging Face's Trainer and TRL: trainer_state.json",
        read_in="transformers 5.23 (2026)",
        form="json",
        keys={
            "step": ("step",),
            "val_loss": ("eval_loss", "eval_*_loss"),
            "loss": ("loss",),
            "grad_norm": ("grad_norm",),
            "lr": ("learning_rate",),
        },
        files=("trainer_state.json",),
    ),
    "lightning": Format(
        about="Lightning's CSVLogger: metrics.csv",
        read_in="lightning 2.6.6, fabric/loggers/csv_logs.py",
        form="csv",
        keys={
            "step": ("step",),
            "val_loss": ("val_loss", "val/loss", "valid_loss", "validation_loss", "val_*_loss", "val_loss/*"),
            "loss": ("train_loss", "train_loss_step", "train/loss", "loss"),
        },
        files=("metrics.csv",),
    ),
    "tensorboard": Format(
        about="TensorBoard's event files",
        read_in="tensorboard 2.21; tags as torchtitan and Megatron-LM have them",
        form="events",
        keys={
            "step": ("step",),
            "val_loss": (
                "val_loss", "val/loss", "eval/loss", "validation/loss", "validation_metrics/loss",
                "lm loss validation",
            ),
            "loss": ("train_loss", "train/loss", "loss_metrics/global_avg_loss", "lm loss"),
        },
        files=("events.out.tfevents.*",),
    ),
    "ablate": Format(
        about="an adapter of ablate: rows.jsonl",
        read_in="ablate itself",
        form="json lines",
        keys={name: (name,) for name in ROW},
        files=("rows.jsonl",),
    ),
}  # fmt: skip
