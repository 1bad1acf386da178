"""What MLflow shows of a study: the points of its curves, names, tags, parameters, columns, descriptions.

A point's step is the number of training tokens, which gives MLflow a token axis; its time stamp is the row's
own. MLflow keeps equal points once, so sending the same rows again changes nothing. MLflow's parameters never
change, so they hold only a run's identity and the factors of its arm.

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

from ablate.base.errors import cut
from ablate.base.files import read_json
from ablate.recipes import GEMMS
from ablate.run.command import REACHES
from ablate.run.config import ModelConfig
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
_MAX_PERPLEXITY = 1e300
_MAX_NOTE = 15_000
_MAX_PARAM = 500
_MAX_TAG = 5_000
_REFUSED = re.compile(r"[^\w\-. ]")
# Okabe and Ito's palette, distinguishable for colour-blind readers; all runs of an arm share a colour.
_BASELINE_COLOUR = "#333333"
_COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#B59F00")
RESULTS = _TOKENS, _COST = "ablate.tokens_to_target", "ablate.token_cost"
"""Tags from the report."""
SUMMARY = "summary"
"""The key of the run that holds the report; other runs have their ids as keys."""
_MOST_CURVES = 40
"""Above this number a chart shows a mean curve for each arm instead of a curve for each run."""
_TAGS = {
    "backend": "ablate.backend",
    "backend_mode": "ablate.backend_mode",
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
    values = {}
    for key, name in _names(row).items():
        if (number := number_in(row, key)) is not None:
            values[name] = number
    if unit == "nats" and values.get("val_loss", math.inf) < math.log(_MAX_PERPLEXITY):
        values["val_perplexity"] = math.exp(values["val_loss"])
    return [
        Point(name, value, round(time_unix * 1000), int(tokens))
        for name, value in values.items()
    ]


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
    return [point for row in parse_rows(lines) for point in points(row, unit)], end


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
    place: int,
    run: LockedRun,
    status: Status,
    environment: dict[str, Any],
    *,
    report: str,
) -> dict[str, str]:
    """Make the tags by which a run is found, filtered and coloured.

    ``place``: of the run's arm in the plan. ``report``: the address of the study's report, for the run's
    description.
    """
    arm = plan.arms[place]
    is_baseline = arm.name == plan.baseline
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
        "ablate.baseline": text(is_baseline),
        "ablate.recipe": arm.recipe or "",
        "ablate.state": status.state,
        "mlflow.runName": f"{arm.name} seed {run.seed}",
        "mlflow.runColor": _BASELINE_COLOUR
        if is_baseline
        else _COLOURS[place % len(_COLOURS)],
        "mlflow.source.name": "ablate",
        "mlflow.note.content": "\n\n".join(filter(None, note)),
    }
    for key, tag in _TAGS.items():
        if (value := environment.get(key)) is not None:
            tags[tag] = text(value)
    if fingerprints := environment.get("fingerprints"):
        tags["ablate.arithmetic"] = " then ".join(map(str, fingerprints))
    if arm.fork is not None:
        tags |= {
            "ablate.fork_from": arm.fork.arm,
            "ablate.fork_tokens": text(arm.fork.tokens),
        }
        tags["ablate.cost_counted_from_tokens"] = text(plan.counted_from(arm.name))
    return _cleaned(tags, arm, _MAX_TAG)


def run_params(config: dict[str, Any], arm: LockedArm) -> dict[str, str]:
    """Flatten the resolved configuration, without fields that have no effect, and the arm's factors."""
    # a command has a model, data and settings of its own
    if isinstance(config.get("trainer"), dict):
        training = {
            key: value for key, value in config["training"].items() if key in REACHES
        }
        config = {
            key: config[key] for key in ("trainer", "recipe", "seed") if key in config
        }
        config["training"] = training
    elif isinstance(model := config.get("model"), dict):
        config = config | {"model": ModelConfig.meaningful_fields(model)}
    return _cleaned(dict(_flat(config, "")), arm, _MAX_PARAM)


def _cleaned(values: dict[str, Any], arm: LockedArm, length: int) -> dict[str, str]:
    """Add the arm's factors, and keep names and texts to what MLflow takes."""
    values = values | {f"factor.{key}": value for key, value in arm.factors.items()}
    return {_name(key): cut(text(value), length) for key, value in values.items()}


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
    state["selectedColumns"] = [
        "tags.`ablate.state`",
        *dict.fromkeys(
            f"params.`{_name(f'factor.{key}')}`"
            for arm in plan.arms
            for key in arm.factors
        ),
        "metrics.`val_loss`",
        *(f"tags.`{key}`" for key in RESULTS),
        "metrics.`tokens_per_sec`",
        "tags.`ablate.backend_mode`",
    ]
    if sum(len(arm.runs) for arm in plan.arms) <= _MOST_CURVES:
        state["groupBy"] = None
    for content in (state | fixed["charts"], state):
        view = json.dumps(content, separators=(",", ":"))
        if len(view) <= _MAX_TAG:
            break
    return view


def _differs(arm: LockedArm) -> str:
    return (
        "; ".join(
            f"{key}: {text(old)} → {text(new)}"
            for key, (old, new) in arm.differs.items()
        )
        or "–"
    )


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
def read_results(path: Path, _stamp: object) -> dict[str, dict[str, str]]:
    """Read what a ``report.json`` found on each run, as tags by run id; empty if it is missing or damaged.

    A run that hit the target has its tokens to target, and its token cost against the baseline's run of the
    same seed. Empty are a hit at the first evaluation, and a single run's cost from a fork on.
    """
    tags = {}
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        report = read_json(path)
        hits: dict[tuple[str, int], float | None] = {}
        for arm in report["arms"]:
            for run in arm["runs"]:
                if not run["at_or_before_first_evaluation"]:
                    hits[arm["name"], run["seed"]] = number_in(run, "tokens_to_target")
        baseline = report["baseline"]
        for arm in report["arms"]:
            is_compared = arm["name"] != baseline and not arm["counted_from_tokens"]
            for run in arm["runs"]:
                tokens = hits.get((arm["name"], run["seed"]))
                baseline_tokens = hits.get((baseline, run["seed"]))
                cost = ""
                if tokens and baseline_tokens and is_compared:
                    cost = f"{tokens / baseline_tokens - 1:+.2%}"
                tags[run["id"]] = {
                    _TOKENS: f"{tokens:.0f}" if tokens else "",
                    _COST: cost,
                }
    return tags
