"""Which runs may be averaged and compared: those that differ in nothing but what the study compares.

A run's id holds its configuration, but not the code that trained it, and an arm may override the baseline's
data or evaluation. So a run is set apart (counted as no result, named in the report) where it differs in

- ``data``, ``tokenizer``, ``evaluation``: from the baseline's configuration;
- ``code``: from the sources that most runs of the study were trained by;
- ``device``: from the kind of GPU (or none) that most runs were trained on;
- ``arithmetic``: from the fingerprint that most runs have (``ablate.execute.environment``), also where a run
  was resumed on another machine than it began on;
- ``world_size``: from the number of devices that most runs had.

A study that wants such a difference waives it by name. A value that a record lacks counts as equal.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from ablate.run.config import Setting, configured
from ablate.store.records import Environment, RecordedConfig

if TYPE_CHECKING:
    from collections.abc import Collection

    from ablate.results.frames import StudyFrames

SETTINGS: tuple[Setting, ...] = get_args(Setting)


_UNKNOWN, _NOWHERE = RecordedConfig(), Environment()
_OF_MOST: tuple[Setting, ...] = ("code", "device", "arithmetic", "world_size")


@dataclass(frozen=True, kw_only=True)
class SetApart:
    """A run that is not pooled: in what it differs, its own value, and that of the others."""

    run: str
    arm: str
    setting: Setting
    own: str
    others: str


def find_set_apart(frames: StudyFrames, waived: Collection[str] = ()) -> tuple[SetApart, ...]:
    """Return the runs with a result that must not be pooled, each with the first setting it differs in."""
    results = frames.runs[frames.runs["state"].isin(("finished", "diverged"))]
    own: dict[str, tuple[str, dict[Setting, str | None]]] = {}
    for run_id, arm in zip(results["run_id"], results["arm"], strict=True):
        config = frames.configs.get(arm, _UNKNOWN)
        own[run_id] = (arm, _fingerprint(config, frames.environments.get(run_id, _NOWHERE)))
    reference: dict[Setting, str | None] = dict(
        _fingerprint(frames.configs.get(frames.plan.baseline, _UNKNOWN), _NOWHERE)
    )
    for setting in _OF_MOST:
        counts = Counter(value for _, marks in own.values() if (value := marks[setting]) is not None)
        reference[setting] = counts.most_common(1)[0][0] if counts else None
    found = []
    for run_id, (arm, marks) in own.items():
        for setting in SETTINGS:
            mine, theirs = marks[setting], reference[setting]
            if setting not in waived and mine is not None and theirs is not None and mine != theirs:
                found.append(SetApart(run=run_id, arm=arm, setting=setting, own=mine, others=theirs))
                break
    return tuple(found)


def _fingerprint(config: RecordedConfig, environment: Environment) -> dict[Setting, str | None]:
    code = environment.code or " ".join(filter(None, (environment.ablate, environment.git_commit))) or None
    # The logs of others may be of any devices, as of any kind of GPU.
    world_size = None if environment.backend_mode == "imported" else environment.world_size
    return {
        **configured({**config.whole, "data": config.data, "training": config.training}),
        "code": code,
        "device": trained_on(environment),
        "arithmetic": " then ".join(environment.fingerprints) or None,
        "world_size": None if world_size is None else str(world_size),
    }


def trained_on(environment: Environment) -> str | None:
    """Return the GPU's name or CPU; None for the logs of others, which may be of any device."""
    if environment.backend_mode in (None, "imported"):
        return None
    return environment.gpu or "CPU"
