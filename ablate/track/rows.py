"""From lines of a run's metrics and diagnostics to MLflow's points: the same bytes give the same points.

A point's step is the number of training tokens, which gives MLflow a token axis; its time stamp is the row's
own ``time_unix``. MLflow keeps equal points once, so sending the same rows again changes nothing. The mirror
may therefore lose its cursor.

How it fails: an incomplete line is left for the next read. A line that is not a row, and a number that is not
finite (a NaN breaks an MLflow page), are left out.
"""

from __future__ import annotations

import hashlib
import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from ablate.base.files import parse_json
from ablate.recipes import GEMMS

if TYPE_CHECKING:
    from pathlib import Path

# metrics.jsonl's name -> MLflow's, by kind of row
_NAMES: dict[str, dict[str, str]] = {
    "train": {
        "loss": "train_loss",
        "lr": "learning_rate",
        "grad_norm": "grad_norm",
        "tokens_per_sec": "tokens_per_sec",
    },
    "eval": {"val_loss": "val_loss"},
}
_SYSTEM = re.compile(r"(?:cpu|process|system|gpu_\d{1,3})_[a-z_]{1,60}")
_DIAGNOSED = ("relative_error", "gain", "bias_share")
_LAYER = re.compile(r"[\w.-]{1,150}", re.ASCII)
_MAX_PERPLEXITY = 1e300
_TAIL_BYTES = 512


class Point(NamedTuple):
    """One value of one metric. ``step`` counts tokens."""

    key: str
    value: float
    timestamp_ms: int
    step: int


def points(row: Any) -> list[Point]:
    """Return the points of one row; empty if it is not a known row."""
    if not isinstance(row, dict) or not _finite(row.get("tokens")) or not _finite(row.get("time_unix")):
        return []
    values = {name: float(row[key]) for key, name in _names(row).items() if _finite(row.get(key))}
    if "val_loss" in values and values["val_loss"] < math.log(_MAX_PERPLEXITY):
        values["val_perplexity"] = math.exp(values["val_loss"])
    timestamp_ms, step = round(row["time_unix"] * 1000), int(row["tokens"])
    return [Point(name, value, timestamp_ms, step) for name, value in values.items()]


def _names(row: dict[str, Any]) -> dict[str, str]:
    kind = row.get("kind")
    if kind == "system":  # MLflow's pages have a tab for metrics with this prefix
        return {key: f"system/{key}" for key in row if _SYSTEM.fullmatch(key)}
    if kind == "diagnosis":
        gemm, layer = row.get("gemm"), row.get("layer")
        if gemm not in GEMMS or not isinstance(layer, str) or not _LAYER.fullmatch(layer):
            return {}
        return {key: f"diag/{gemm}/{key}/{layer}" for key in _DIAGNOSED}
    return _NAMES.get(kind, {}) if isinstance(kind, str) else {}


def read_points(path: Path, offset: int, max_bytes: int) -> tuple[list[Point], int]:
    """Return the points of the complete lines from ``offset`` on, and the offset after them.

    Reads about ``max_bytes``; the offset stays where it is when no complete line follows.
    """
    if not path.exists():
        return [], offset
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read(max_bytes)
        if len(content) == max_bytes and not content.endswith(b"\n"):
            content += file.readline()  # a line longer than the chunk must not block the file
    end = content.rfind(b"\n") + 1
    found: list[Point] = []
    for line in content[:end].splitlines():
        try:
            found.extend(points(parse_json(line)))
        except ValueError:
            continue
    return found, offset + end


def tail_digest(path: Path, offset: int) -> str | None:
    """Return a digest of the bytes just before ``offset``, None where the file is shorter.

    A file that was rewound and grew again past the offset has other bytes there, since every row holds its
    own time.
    """
    if offset == 0:
        return ""
    if not path.exists() or path.stat().st_size < offset:
        return None
    start = max(0, offset - _TAIL_BYTES)
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.sha256(file.read(offset - start)).hexdigest()[:16]


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
