"""What MLflow shows of a study: the points of its curves, names, tags, parameters, columns, descriptions.

A point's step is the number of training tokens, which gives MLflow a token axis; its time stamp is the row's
own. MLflow keeps equal points once, so sending the same rows again changes nothing. MLflow's parameters never
change, so they hold only a run's identity and what its arm differs in.

How it fails: it raises nothing. A line that is not a row, and a number that is not finite (a NaN breaks an
MLflow page), are left out. Long texts and names are cut and cleaned to MLflow's limits.
"""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ablate.base.colours import arm_colours
from ablate.base.config_base import written_short
from ablate.base.errors import cut
from ablate.base.files import read_json
from ablate.recipes import GEMMS
from ablate.run.command import REACHES
from ablate.run.config import config_from_json
from ablate.store.metrics import new_lines, number_in, parse_rows

if TYPE_CHECKING:
    from ablate.store import Status
    from ablate.store.plan_file import LockedArm, LockedPlan, LockedRun

# metrics.jsonl's name -> MLflow's, by kind of row
_NAMES: dict[str, dict[str, str]] = {
    "train": {
        "loss": "train_loss",
        "lr": "learning_rate",
        "grad_norm": "grad_norm",
        "tokens_per_sec": "tokens_per_sec",
        "weights_reset": "weights_reset",
    },
    "eval": {"val_loss": "val_loss", "val_loss_bf16": "val_loss_bf16"},
}
_SYSTEM = re.compile(r"(?:cpu|process|system|gpu_\d{1,3})_[a-z_]{1,60}")
_DIAGNOSED = ("relative_error", "gain", "bias_share", "zeros")
_LAYER = re.compile(r"[\w.-]{1,150}", re.ASCII)
_MAX_LOSS = math.log(1e300)
"""Above this its perplexity is left out."""
_MAX_NOTE = 15_000
_MAX_PARAM = 500
_MAX_TAG = 5_000
_REFUSED = re.compile(r"[^\w\-. ]")
_SEEN = 12
"""Characters of a run's name that MLflow's narrow lists and legends show."""
_WORD = re.compile(r"[^\W_]+")
RESULTS = (
    "tokens_to_target",
    "token_cost",
    "token_cost_low",
    "token_cost_high",
)
"""Metrics from the report."""
PLAN_TAG = "ablate.plan"
"""The tag that says whether a run belongs to the study as it is now: ``current`` or ``earlier``."""
SUMMARY = "summary"
"""The key of the run that holds the report; other runs have their ids as keys."""
_MOST_CURVES = 40
"""Above this number a chart shows a mean curve for each arm instead of a curve for each run."""
_TAGS = {
    "backend": "ablate.backend",
    "backend_mode": "ablate.backend_mode",
    "command": "ablate.command",
    "code": "ablate.code",
    "code_commit": "ablate.code_commit",
    "git_commit": "mlflow.source.git.commit",
}
"""Name in ``environment.json`` → tag."""


class Point(NamedTuple):
    """One value of one metric. ``step`` counts tokens."""

    key: str
    value: float
    timestamp_ms: int
    step: int


def points(row: Any, unit: str = "nats") -> list[Point]:
    """Convert one row to points; empty if the row is of no known kind. ``unit``: of its loss."""
    if not isinstance(row, dict):
        return []
    tokens = number_in(row, "tokens")
    time_unix = number_in(row, "time_unix")
    if tokens is None or time_unix is None:
        return []
    place = (round(time_unix * 1000), int(tokens))
    points = []
    for key, name in _names(row).items():
        value = number_in(row, key)
        if value is not None:
            points.append(Point(name, value, *place))
            if name == "val_loss" and unit == "nats" and value < _MAX_LOSS:
                points.append(Point("val_perplexity", math.exp(value), *place))
    return points


def _names(row: dict[str, Any]) -> dict[str, str]:
    """Map the keys of a row that are shown to MLflow's names."""
    kind = row.get("kind")
    gemm = row.get("gemm")
    layer = row.get("layer")
    if kind == "system":  # MLflow's pages have a tab for metrics with this prefix
        return {key: f"system/{key}" for key in row if _SYSTEM.fullmatch(key)}
    if kind not in ("diagnosis", "load"):
        return _NAMES.get(kind, {}) if isinstance(kind, str) else {}
    if not isinstance(layer, str) or not _LAYER.fullmatch(layer):
        return {}
    if kind == "load":
        return {"busiest": f"diag/busiest_expert/{layer}"}
    if gemm in GEMMS:
        return {key: f"diag/{gemm}/{key}/{layer}" for key in _DIAGNOSED}
    return {}


def read_points(
    path: Path,
    offset: int,
    max_bytes: int,
    unit: str = "nats",
) -> tuple[list[Point], int]:
    """Read the points of the complete lines from ``offset`` on; return them and the offset after the lines.

    Reads about ``max_bytes``. The offset is unchanged if no complete line follows.
    """
    lines, end = new_lines(path, offset, max_bytes)
    read: list[Point] = []
    for row in parse_rows(lines):
        read += points(row, unit)
    return read, end


def text(value: Any) -> str:
    """Write a value as text: ``fprop+dgrad``, ``none``, ``true``, ``0.004``."""
    if value is None or value == []:
        return "none"
    if isinstance(value, str):
        return value
    if isinstance(value, list) and not any(
        isinstance(item, list | dict) for item in value
    ):
        return "+".join(text(item) for item in value)
    return json.dumps(value, ensure_ascii=False)


def run_tags(
    plan: LockedPlan,
    arm: LockedArm,
    run: LockedRun,
    status: Status,
    environment: dict[str, Any],
    *,
    report: str,
) -> dict[str, str]:
    """Make the tags by which a run is found, filtered and coloured.

    ``report``: the address of the study's report, for the run's description.
    """
    note = [
        arm.description or "",
        f"**{arm.recipe}**",
        f"Differs from the baseline: {_differs(arm)}",
    ]
    if environment.get("backend_mode") == "command":
        by_command = "By the command, as configured"
        if markers := environment.get("markers"):
            by_command += f"; its output held: {text(markers)}"
        note.append(by_command)
    if status.state in ("diverged", "failed", "interrupted", "stopped"):
        note.append(
            f"{status.state.capitalize()} after {status.tokens:,} tokens. {status.message or ''}"
        )
    note.append(f"[The study's report]({report}). Step: training tokens.")
    tags = {
        "ablate.run_id": run.id,
        "ablate.arm": arm.name,
        "ablate.seed": text(run.seed),
        "ablate.baseline": text(arm.name == plan.baseline),
        "ablate.recipe": arm.recipe or "",
        "ablate.state": status.state,
        PLAN_TAG: "current",
        "mlflow.runName": run_name(plan, arm, run),
        "mlflow.runColor": _colour(plan, arm),
        "mlflow.source.name": "ablate",
        "mlflow.note.content": "\n\n".join(filter(None, note)),
    }
    for key, tag in _TAGS.items():
        if (value := environment.get(key)) is not None:
            tags[tag] = text(value)
    if fingerprints := environment.get("fingerprints"):
        tags["ablate.arithmetic"] = " then ".join(map(str, fingerprints))
    if arm.fork is not None:
        tags["ablate.fork_from"] = arm.fork.arm
        tags["ablate.fork_tokens"] = text(arm.fork.tokens)
        tags["ablate.cost_counted_from_tokens"] = text(plan.counted_from(arm.name))
    for key, value in arm.factors.items():
        tags[f"factor.{key}"] = text(value)
    return {_name(key): cut(value, _MAX_TAG) for key, value in tags.items()}


def _colour(plan: LockedPlan, arm: LockedArm) -> str:
    """Choose an arm's colour in the report, where a tuned arm stands for the one it was tuned from."""
    originals: dict[str, str] = {}
    if plan.tuning is not None:
        originals = {tuned: name for name, tuned in plan.tuning.tuned.items()}
    names = [originals.get(other.name, other.name) for other in plan.arms]
    colours = arm_colours(dict.fromkeys(names), plan.baseline)
    return colours[originals.get(arm.name, arm.name)]


def run_name(plan: LockedPlan, arm: LockedArm, run: LockedRun) -> str:
    """Name a run so that its first characters tell it apart: ``s0 three + sr (all three + sr)``.

    Words are cut from the front of an arm's name until no other name holds its first characters; else the
    arm's number stands in front.
    """
    widest_seed = max(len(f"s{other.seed} ") for _, other in plan.runs())
    length = _SEEN - widest_seed
    taken = set()
    for name in [other.name for other in plan.arms if other != arm]:
        for start in range(len(name)):
            taken.add(name[start : start + length])
    short = f"{plan.arms.index(arm) + 1} {arm.name}"
    for start in (0, *(word.start() for word in _WORD.finditer(arm.name))):
        if arm.name[start : start + length] not in taken:
            short = arm.name[start:]
            break
    whole = "" if short.endswith(arm.name) else f" ({arm.name})"
    return f"s{run.seed} {short}{whole}"


def run_params(
    config: dict[str, Any], plan: LockedPlan, arm: LockedArm
) -> dict[str, str]:
    """Flatten what the configuration sets, after what the study's arms differ in (``arm.KEY``).

    Defaults are left out: ``config.json`` has all.
    """
    differing: dict[str, Any] = {}
    for other in plan.arms:
        for key, (baseline_value, _) in other.differs.items():
            differing[f"arm.{key}"] = baseline_value
    for key, (_, value) in arm.differs.items():
        differing[f"arm.{key}"] = value
    with suppress(ValueError):  # a log of others
        config = written_short(config_from_json(config))
    flat = dict(_flat(config, ""))
    # a command has a model, data and settings of its own
    if isinstance(config.get("trainer"), dict):
        reached = ("trainer", "recipe", "seed", *(f"training.{key}" for key in REACHES))
        for key in [key for key in flat if not key.startswith(reached)]:
            del flat[key]
    flat = differing | flat
    return {_name(key): cut(text(value), _MAX_PARAM) for key, value in flat.items()}


def study_note(plan: LockedPlan, *, report: str) -> str:
    """Write the study's description, target and arms in Markdown, with a link to its report."""
    if plan.target is None:
        target = "none"
    else:
        target = f"{plan.target.kind} {plan.target.value:g}"
    lines = [
        f"{plan.description or ''}\n",
        f"- **Target**: {target}",
        f"- **Validation losses**: in {plan.unit}",
        f"- **Baseline**: `{plan.baseline}`",
        f"- **Report**: [token cost, curves and verdict]({report})",
        "- **Step** of a metric: training tokens\n",
        "| arm | recipe | differs from the baseline | seeds |\n|---|---|---|---|",
    ]
    for arm in plan.arms:
        seeds = ", ".join(str(run.seed) for run in arm.runs)
        cells = [arm.name, arm.recipe or "", _differs(arm), seeds]
        row = " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
        lines.append(f"| {row} |")
    return cut("\n".join(lines).strip(), _MAX_NOTE)


def view(plan: LockedPlan) -> str:
    """Write the columns and charts of the study's page, in MLflow's format for shared views (JSON).

    ``view.json`` has what is the same for every study: our order of the charts (MLflow's own is by name), and
    the group of an arm, which is for many curves. MLflow adds the charts of other metrics itself, and shows
    none that have no values. The charts are left out if they do not fit in a tag.
    """
    fixed = read_json(Path(__file__).parent / "view.json")
    state = fixed["state"]
    state["searchFilter"] = f"tags.`{PLAN_TAG}` = 'current'"
    columns = {"tags.`ablate.state`": None}
    for arm in plan.arms:
        for key in arm.differs:
            columns[f"params.`{_name(f'arm.{key}')}`"] = None
    for key in ("val_loss", *RESULTS, "tokens_per_sec"):
        columns[f"metrics.`{key}`"] = None
    state["selectedColumns"] = [*columns, "tags.`ablate.backend_mode`"]
    if sum(len(arm.runs) for arm in plan.arms) <= _MOST_CURVES:
        state["groupBy"] = None
    for content in (state | fixed["charts"], state):
        view = json.dumps(content, separators=(",", ":"))
        if len(view) <= _MAX_TAG:
            break
    return view


def _differs(arm: LockedArm) -> str:
    pairs = arm.differs.items()
    changes = [f"{key}: {text(old)} → {text(new)}" for key, (old, new) in pairs]
    return "; ".join(changes) or "–"


def _flat(value: Any, prefix: str) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(prefix, value)]
    pairs = []
    for key, inner in value.items():
        pairs += _flat(inner, f"{prefix}.{key}".removeprefix("."))
    return pairs


def _name(key: str) -> str:
    return _REFUSED.sub("_", key)[:250]


@lru_cache(maxsize=1)
def read_results(
    path: Path, stamp: tuple[int, int, int] | None
) -> dict[str, list[Point]]:
    """Read what a ``report.json`` found, as points by run id; empty if it is missing or damaged.

    ``tokens_to_target`` is the run's own, unless it hit at its first evaluation; ``token_cost`` and its
    interval are its arm's. What was not found is left out. Values have four decimals, so that they fit into a
    column. ``stamp``: of the file; it ends with the time of the points, in ns. Their step is 0, for which
    MLflow draws bars.
    """
    points: dict[str, list[Point]] = {}
    milliseconds = stamp[-1] // 1_000_000 if stamp else 0
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        for arm in read_json(path)["arms"]:
            cost = arm["token_cost"]
            for run in arm["runs"]:
                values = [number_in(cost, key) for key in ("estimate", "low", "high")]
                hit = number_in(run, "tokens_to_target")
                values.insert(0, None if run["at_or_before_first_evaluation"] else hit)
                points[run["id"]] = []
                for name, value in zip(RESULTS, values, strict=True):
                    if value is not None:
                        point = Point(name, round(value, 4), milliseconds, 0)
                        points[run["id"]].append(point)
    return points
