"""What a study trained, in one line: model, data, tokens, device, how FP4 was computed, and the command."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from ablate.reports.findings.compare import parameter_count
from ablate.reports.words.format import tokens
from ablate.run.command import Command

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.reports.findings.results import Analysis
    from ablate.run.config import RunConfig

_FP4 = {
    "native": "FP4 on the device's own units",
    "emulated": "FP4 emulated exactly, without FP4 units",
    "command": "FP4 by the command, as configured",
    "logged": "read from logs of others, who vouch for their FP4",
}
"""How FP4 was computed, by the kind of timing."""
_MOST_NAMES = 3
"""Of the files or folders of the data."""


def trained(analysis: Analysis) -> str:
    """Say in one line what the baseline's runs trained; what is not known is left out."""
    config = analysis.baseline_arm.config
    pythons = [
        str(environment["python"])
        for environment, _ in analysis.environments
        if "python" in environment
    ]
    parts = [] if config is None else [*_model_and_data(config, pythons)]
    if budget := analysis.plan.training.get("tokens"):
        parts.append(f"{tokens(budget)} tokens a run")
    if devices := dict.fromkeys(_devices(analysis)):
        parts.append(f"on {' or '.join(devices)}")
    if analysis.environments:
        parts.append(_FP4[analysis.timing.kind])
    text = "; ".join(parts)
    if config is not None and isinstance(config.trainer, Command):
        text += f": `{config.trainer.line}`"
    return text


def _model_and_data(config: RunConfig, pythons: list[str]) -> Iterator[str]:
    if isinstance(config.trainer, Command):  # it reads data of its own
        if config.model.describes(config.trainer):
            yield config.model.summary
        return
    text = config.model.summary
    parameters = parameter_count(config)
    if parameters is not None:
        text += f" ({tokens(parameters)} parameters)"
    names = [PurePath(path).name for path in config.data.paths]
    data = " ".join([config.data.source, *names[:_MOST_NAMES]])
    if config.data.source == "stdlib" and pythons:  # each Python has another text
        data += f" of Python {' or '.join(dict.fromkeys(pythons))}"
    yield f"{text}, on {data}"


def _devices(analysis: Analysis) -> Iterator[str]:
    """Name what each environment trained a run on: its GPUs, or else its processor."""
    if hardware := analysis.plan.training.get("hardware"):  # as logs of others say
        yield str(hardware)
        return
    for environment, _ in analysis.environments:
        if name := environment.get("gpu") or environment.get("cpu"):
            yield f"{environment.get('world_size') or 1} × {name}"
