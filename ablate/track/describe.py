"""What MLflow shows of a study besides curves: names, tags, parameters, columns, descriptions in Markdown.

Pure functions of the plan, the configuration, the status and the environment. Tags may change (an arm is
renamed, a state changes). MLflow's parameters may not, so they hold only a run's identity and the factors of
its arm.

How it fails: it raises nothing. Long texts are cut to MLflow's limits, and characters that MLflow refuses in
names become ``_``.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ablate.store import Status
    from ablate.store.lock import LockedArm, LockedPlan, LockedRun

_MAX_NOTE = 15_000
_MAX_PARAM = 500
_MAX_TAG = 5_000
_REFUSED = re.compile(r"[^\w\-. ]")
# Okabe and Ito's palette, distinguishable for colour-blind readers; all runs of an arm share a colour.
_BASELINE_COLOUR = "#333333"
_COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#B59F00")
_MOST_CURVES = 40
"""Above this number a chart shows a mean curve for each arm instead of a curve for each run."""
_TARGETS = {"val_loss": "validation loss {} nats per token", "perplexity": "perplexity {}"}


def run_name(arm: str, seed: int) -> str:
    """Return a run's name in MLflow."""
    return f"{arm} seed {seed}"


def text(value: Any) -> str:
    """Return a value as text: ``fprop+dgrad``, ``none``, ``true``, ``0.004``."""
    if value is None or value == []:
        return "none"
    if isinstance(value, str):
        return value
    if isinstance(value, list) and not any(isinstance(item, list | dict) for item in value):
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
    """Return the tags for finding, filtering and colouring a run of the arm at ``place``.

    ``report``: the address of the study's report, for the run's description.
    """
    arm = plan.arms[place]
    is_baseline = arm.name == plan.baseline
    tags = {
        "ablate.run_id": run.id,
        "ablate.arm": arm.name,
        "ablate.seed": text(run.seed),
        "ablate.baseline": text(is_baseline),
        "ablate.recipe": arm.recipe or "",
        "ablate.state": status.state,
        "mlflow.runColor": _BASELINE_COLOUR if is_baseline else _COLOURS[place % len(_COLOURS)],
        "mlflow.source.name": "ablate",
        "mlflow.note.content": _run_note(arm, status, report),
    }
    for key, tag in {
        "backend": "ablate.backend",
        "backend_mode": "ablate.backend_mode",
        "timing_valid": "ablate.timing_valid",
        "git_commit": "mlflow.source.git.commit",
    }.items():
        if environment.get(key) is not None:
            tags[tag] = text(environment[key])
    tags |= {f"factor.{key}": text(value) for key, value in arm.factors.items()}
    return {_name(key): _cut(value, _MAX_TAG) for key, value in tags.items()}


def run_params(config: dict[str, Any], arm: LockedArm) -> dict[str, str]:
    """Return the resolved configuration, flattened, and the arm's factors."""
    params = {key: text(value) for key, value in _flat(config, "")}
    params |= {f"factor.{key}": text(value) for key, value in arm.factors.items()}
    return {_name(key): _cut(value, _MAX_PARAM) for key, value in params.items()}


def study_note(plan: LockedPlan, *, report: str) -> str:
    """Return the study's description, design and arms in Markdown, with a link to its report."""
    target, arms = plan.target, plan.arms
    runs = sum(len(arm.runs) for arm in arms)
    facts = {
        "Target": _TARGETS[target.kind].format(text(target.value)),
        "Baseline": f"`{plan.baseline}`",
        "Design": f"{len(arms)} arms, {runs} runs",
        "Schedule": text(plan.training.get("schedule")),
        "Axis": "the step of every metric is the number of training tokens",
        "Report": f"[token cost, curves and verdict]({report})",
    }
    lines = [
        plan.description or "",
        "",
        *(f"- **{key}**: {value}" for key, value in facts.items()),
        "",
    ]
    lines += ["| arm | recipe | differs from the baseline | seeds |", "|---|---|---|---|"]
    dropped = len(plan.dropped)
    closing = [f"\nSenseless cells of the design, dropped: {dropped}."] if dropped else []
    room = _MAX_NOTE - sum(len(line) + 1 for line in lines + closing)
    for place, arm in enumerate(arms):
        seeds = ", ".join(str(run.seed) for run in arm.runs)
        row = f"| {_cell(arm.name)} | {_cell(arm.recipe or '')} | {_cell(_differs(arm))} | {seeds} |"
        room -= len(row) + 1
        if room < 0:
            lines.append(f"| … {len(arms) - place} more arms | | | |")
            break
        lines.append(row)
    return "\n".join(lines + closing).strip()


def report_link(experiment_id: str, summary: str) -> str:
    """Return the address of the report in MLflow's pages, where it is an artifact of the run ``summary``."""
    return f"#/experiments/{experiment_id}/runs/{summary}/artifacts/report/report.html"


def summary_note(study: str, report: str) -> str:
    """Return the description of the run that has the report."""
    return (
        f"[The study's report]({report}). It comes when the study ends; `ablate report {study}` makes it now."
    )


def view(plan: LockedPlan) -> str:
    """Return the columns and charts of the study's page, in MLflow's format for shared views (JSON)."""
    factors = list(dict.fromkeys(key for arm in plan.arms for key in arm.factors))
    columns = [
        "tags.`ablate.state`",
        *(f"params.`{_name(f'factor.{key}')}`" for key in factors),
        *(f"metrics.`{key}`" for key in ("val_loss", "train_loss", "tokens_per_sec")),
        "tags.`ablate.backend_mode`",
    ]
    many = sum(len(arm.runs) for arm in plan.arms) > _MOST_CURVES
    group = {"groupByKeys": [{"mode": "tag", "groupByData": "ablate.arm"}], "aggregateFunction": "average"}
    state = {
        "orderByKey": "attributes.start_time",
        "orderByAsc": True,
        "selectedColumns": columns,
        "runsHiddenMode": "SHOW_ALL",
        "groupBy": group if many else None,
        "useGroupedValuesInCharts": True,
    }
    return json.dumps(state, separators=(",", ":"))


def _run_note(arm: LockedArm, status: Status, report: str) -> str:
    lines = [
        arm.description or "",
        f"**{arm.recipe}**",
        f"Differs from the baseline: {_differs(arm)}",
    ]
    if status.state in ("diverged", "failed", "interrupted", "stopped"):
        lines.append(f"{status.state.capitalize()} after {status.tokens:,} tokens. {status.message or ''}")
    lines.append(f"[The study's report]({report})")
    return "\n\n".join(line for line in lines if line).strip()


def _differs(arm: LockedArm) -> str:
    return "; ".join(f"{key}: {text(old)} → {text(new)}" for key, (old, new) in arm.differs.items()) or "–"


def _flat(value: Any, prefix: str) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(prefix, value)]
    return [
        pair
        for key, inner in value.items()
        for pair in _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    ]


def _name(key: str) -> str:
    return _REFUSED.sub("_", key)[:250]


def _cut(value: str, length: int) -> str:
    return value if len(value) <= length else value[: length - 1] + "…"


def _cell(value: str) -> str:
    return value.replace("|", "\\|").replace("\n", " ")
