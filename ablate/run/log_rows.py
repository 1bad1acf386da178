"""Rows of a training log: what a trainer prints, as steps, losses and speeds.

A log is read by regular expressions with named groups, or by the keys of JSON: of lines, of the state that
Hugging Face's ``Trainer`` writes, and of TensorBoard's events. Adapters of ``ablate.integrations`` write rows
as JSON lines. ``PRESETS`` holds the forms of known trainers, each with the version in which it was read.
Colours (ANSI) are removed first.

How it fails: a line that fits nothing is no row. A pattern that cannot work is a ``ValueError`` of one line.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from ablate.base.config_base import Section, key, said

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PLACES = ("step", "tokens", "samples")
"""Where in the training a row is; ``samples`` are sequences."""
VALUES = ("val_loss", "loss", "grad_norm", "lr", "step_ms", "tokens_per_sec", "tokens_per_sec_per_device")
"""What a row may tell. Losses in nats per token; ``step_ms``: milliseconds for an optimizer step."""
ROW = (*PLACES, *VALUES)
_NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|(?i:nan|inf(?:inity)?))"
COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
"""ANSI's codes."""

PresetName = Literal["megatron", "torchtitan", "nanogpt", "mllog", "hf", "ablate"]
PRESET_NAMES: tuple[str, ...] = get_args(PresetName)


def _pattern(*parts: str) -> str:
    """Join parts of a pattern, in which ``<name>`` stands for a number of that name."""
    return re.sub(r"<(\w+)>", lambda match: f"(?P<{match[1]}>{_NUMBER})", "".join(parts))


PRESETS: dict[PresetName, tuple[str, ...]] = {
    # Megatron-LM d98e8a64 (August 2026), training.py; Megatron-Bridge and Primus print the same words. The
    # last rank prints evaluations; the one on the test set at the end is not read.
    "megatron": (
        _pattern(
            r"iteration\s+<step>/\s*\d+ \|.*?elapsed time per iteration \(ms\): <step_ms>",
            r".*?learning rate: <lr>.*?lm loss: <loss>(?:.*?grad norm: <grad_norm>)?",
        ),
        _pattern(r"validation loss at iteration <step>(?: on validation set)? \| lm loss value: <val_loss>"),
    ),
    # torchtitan b5bcd76c (2026), components/metrics.py. ``tps`` is of one device.
    "torchtitan": (
        _pattern(
            r"(?<!validate )step:\s*<step>\s+loss:\s*<loss>\s+grad_norm:\s*<grad_norm>",
            r".*?tps:\s*<tokens_per_sec_per_device>",
        ),
        _pattern(r"validate step:\s*<step>\s+loss:\s*<val_loss>"),
    ),
    # modded-nanogpt f411b3d3 (2026), train_gpt.py. ``step_avg`` is the mean since the beginning.
    "nanogpt": (_pattern(r"step:<step>/\d+ val_loss:<val_loss> .*?step_avg:<step_ms>ms"),),
    # MLPerf's logging, v5.1 (2025): the keys of a line come in this order.
    "mllog": (
        _pattern(r':::MLLOG .*"key": "eval_accuracy", "value": <val_loss>,.*"samples_count": <samples>'),
    ),
}
HF_KEYS = {"val_loss": "eval_loss", "loss": "loss", "grad_norm": "grad_norm", "lr": "learning_rate"}
"""What Hugging Face's ``Trainer`` calls the values of a row, in ``trainer_state.json``."""


@dataclass(frozen=True, kw_only=True, eq=False, config=ConfigDict(extra="forbid"))
class LogSource(Section):
    """Where the rows of a command come from; one of the four ways."""

    preset: PresetName | None = key(None, "the log of a known trainer")
    patterns: list[str] = key(
        list,
        "regular expressions whose groups name what they find, such as (?P<step>…) and (?P<val_loss>…)",
    )
    jsonl: dict[str, str] = key(dict, "lines of JSON: {our name: their key}, such as {val_loss: eval/loss}")
    tensorboard: dict[str, str] = key(dict, "event files: {our name: their tag}; file: their folder")
    file: str | None = key(
        None, "the file to read, as a path or glob that may hold {run_dir}; default: what the command prints"
    )

    @property
    def place(self) -> str | None:
        """The file or folder to read, None for what the command prints."""
        return "{run_dir}/rows.jsonl" if self.preset == "ablate" else self.file

    def __post_init__(self) -> None:
        ways = [name for name in ("preset", "patterns", "jsonl", "tensorboard") if getattr(self, name)]
        if len(ways) != 1:
            got = "none" if not ways else " and ".join(ways)
            raise said(f"expected one of preset, patterns, jsonl and tensorboard, got {got}", None)
        if self.tensorboard and self.file is None:
            raise said("event files are in a folder", "name it: file: '{run_dir}/tb'", "tensorboard")
        if self.preset == "hf" and self.file is None:
            hint = "name it: file: '{run_dir}/out/**/trainer_state.json'"
            raise said("hf reads the state that Trainer writes at each save", hint, "preset")
        named: dict[str, tuple[str | int, ...]] = {
            name: (ways[0], name) for name in self.jsonl or self.tensorboard
        }
        for index, pattern in enumerate(self.patterns):
            named |= dict.fromkeys(compiled(pattern, ways[0], index).groupindex, (ways[0], index))
        for name, where in named.items():
            if name not in ROW:
                raise said(f"'{name}' is no part of a row", f"expected {', '.join(ROW)}", *where)
        if self.preset is None and "val_loss" not in named:
            raise said("nothing reads val_loss", "a validation loss in nats per token", ways[0])
        if (self.patterns or self.jsonl) and named.keys().isdisjoint(PLACES):
            raise said(f"nothing reads {', '.join(PLACES[:-1])} or {PLACES[-1]}", None, ways[0])


def compiled(pattern: str, *where: str | int) -> re.Pattern[str]:
    """Compile a regular expression of a study; an error is at the key ``where``."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise said(f"no regular expression: {error}", None, *where) from None


class LogReader:
    """Turns lines of a log into rows ``{place: int, value: float}``, in the order in which they stand.

    A place keeps its value until it is found again, because some trainers print it on a line of its own.
    """

    def __init__(self, source: LogSource) -> None:
        texts = PRESETS.get(source.preset, ()) if source.preset else source.patterns
        self._patterns = [re.compile(text) for text in texts]
        keys = {"ablate": dict(zip(ROW, ROW, strict=True)), "hf": {"step": "step", **HF_KEYS}}
        events = source.tensorboard and {"step": "step", **source.tensorboard}
        self._keys = source.jsonl or events or keys.get(str(source.preset), {})
        self._place: dict[str, int] = {}

    def rows(self, line: str) -> Iterator[dict[str, Any]]:
        """Yield the rows of one line, or of a whole ``trainer_state.json``."""
        line = COLOURS.sub("", line)
        for match in filter(None, (pattern.search(line) for pattern in self._patterns)):
            yield from self._row(match.groupdict())
        if self._keys:
            try:
                content = json.loads(line[line.index("{") :])
            except ValueError:
                return
            entries = _deep(content, "log_history") or [content]
            for one in entries if isinstance(entries, list) else ():
                yield from self._row({ours: _deep(one, theirs) for ours, theirs in self._keys.items()})

    def _row(self, found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        numbers = {name: number for name, value in found.items() if (number := _number(value)) is not None}
        places = {name: numbers.pop(name) for name in PLACES if name in numbers}
        self._place |= {name: int(value) for name, value in places.items() if 0 <= value < 1 << 62}
        if ("val_loss" in numbers or "loss" in numbers) and self._place:
            yield {**self._place, **numbers}


def _deep(content: Any, name: str) -> Any:
    """Find a key, or a path of keys with dots; None if there is no such key."""
    if isinstance(content, dict) and name in content:
        return content[name]
    value = content
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        try:
            return float(value.replace(",", "").strip("'\" "))
        except ValueError:
            return None
    return float(value) if type(value) in (int, float) else None
