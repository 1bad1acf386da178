"""How each run of a study has ended, which runs may be compared, and the comparisons that a study holds.

Runs may be averaged and compared if they differ only in what the study compares. A run's id covers its
configuration but not the code that trained it, and an arm may override the baseline's data or evaluation. So
a run is set apart (not counted as a result, named in the report) if it differs in

- ``data``, ``tokenizer``, ``evaluation``: from the baseline's configuration;
- ``code``: from the sources that trained most runs of the study; where arms test code of their own, most runs
  of the same ``code``;
- ``device``: from the GPU model (or CPU) that most runs were trained on;
- ``arithmetic``: from the fingerprint of most runs (``ablate.execute.environment``), also if a run was
  resumed on a machine with another fingerprint;
- ``world_size``: from the number of devices that most runs had.

A study that wants such a difference waives it by name. A value missing from a record counts as equal.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

import numpy as np

from ablate.results.losses import Curve
from ablate.run.config import Setting, configured
from ablate.run.outcome import LocalFit, outcome
from ablate.run.schedule import steady_spans
from ablate.store.records import Environment, RecordedConfig

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from ablate.results.frames import StudyFrames
    from ablate.store.plan_file import LockedPlan, LockedTuning

_OF_MOST_RUNS: tuple[Setting, ...] = ("device", "arithmetic", "world_size")
"""The settings that are compared with most runs'; code with most of the same code, the others with the baseline's."""


@dataclass(frozen=True, kw_only=True)
class RunResult(Curve):
    """One run: its ``state``, its curve, and how it ended with regard to the target.

    ``trained``: tokens, of the ``budget``, which is in tokens as well.
    """

    state: str
    trained: int
    budget: int
    message: str | None
    seconds: float | None
    tokens_per_sec: float | None
    devices: int
    backend_mode: str | None

    @property
    def tokens_to_target(self) -> float | None:
        """None without a hit."""
        return self.high if self.end == "hit" else None

    @property
    def left_bound(self) -> bool:
        """Whether the run reached the target at or before its first evaluation."""
        return self.end == "hit" and not self.exact and not self.at_change

    @property
    def last_loss(self) -> float | None:
        """Nats per token."""
        return float(self.loss[-1]) if len(self.loss) else None


def run_ends(
    frames: StudyFrames, apart: Collection[str], origin: int = 0
) -> Iterator[RunResult]:
    """Yield how each run has ended, in the order of the plan; runs ``apart`` do not count as results.

    ``origin``: the token count from which tokens to target are counted; earlier evaluations are left out.
    """
    target = frames.plan.target
    spans_of_arms = {
        arm: _steady_spans(config, origin) for arm, config in frames.configs.items()
    }
    arm_tokens = {arm.name: arm.tokens for arm in frames.plan.arms}
    evals = frames.evals[frames.evals["tokens"] >= origin]
    evals_of_runs = {
        str(run_id): group for run_id, group in evals.groupby("run_id", sort=False)
    }
    for run_id, run in frames.runs.items():
        status = run.status
        environment = frames.environments.get(run_id, Environment())
        run_evals = evals_of_runs.get(run_id, evals.iloc[:0])
        tokens = run_evals["tokens"].to_numpy(dtype=np.int64)
        loss = run_evals["val_loss"].to_numpy(dtype=float)
        fit = LocalFit(tokens, loss, spans_of_arms.get(run.arm, ()))
        end = outcome(
            seed=run.seed,
            state="set apart" if run_id in apart else status.state,
            tokens=tokens,
            loss=loss,
            target=None if target is None else target.val_loss,
            rule="confirmed" if target is None else target.crossing,
            budget_tokens=float(run.budget or 0),
            fit=fit,
        ).after(origin)
        seconds = None
        if status.started_unix is not None and status.ended_unix is not None:
            seconds = status.ended_unix - status.started_unix
        yield RunResult(
            **vars(end),
            run_id=run_id,
            arm=run.arm,
            tokens=tokens,
            loss=loss,
            fit=fit,
            origin=origin,
            state=status.state,
            # The status is written at the end of an attempt; a killed attempt may have later evaluations.
            trained=max(status.tokens, int(tokens[-1]) if len(tokens) else 0),
            budget=arm_tokens[run.arm] or run.budget or 0,
            message=status.message,
            seconds=seconds,
            tokens_per_sec=run.tokens_per_sec,
            devices=environment.world_size or 1,
            backend_mode=environment.backend_mode,
        )


def _steady_spans(config: RecordedConfig, origin: int) -> list[tuple[float, float]]:
    """Return the spans of tokens in which an arm's training does not change; empty where unknown."""
    # the user's own trainer may follow another schedule
    if config.whole.get("trainer") is not None:
        return []
    training = config.training or {}
    recipe = config.recipe or {}
    phases = list(recipe.get("phases") or ())
    if recipe.get("deoscillate"):
        phases.append(recipe["deoscillate"])
    switches = []
    for phase in phases:
        fraction = phase.get("from_fraction") or 0.0
        switches.append(
            phase.get("from_tokens") or round(fraction * (training.get("tokens") or 0))
        )
    fork = config.whole.get("fork")
    if isinstance(fork, dict) and isinstance(fork.get("tokens"), int):
        switches.append(fork["tokens"])
    return [
        (max(start, origin), end) for start, end in steady_spans(training, switches)
    ]


def origins(plan: LockedPlan) -> dict[int, frozenset[str]]:
    """Map each token count from which costs are counted to the arms counted from it; always includes 0."""
    arms: dict[int, frozenset[str]] = {0: frozenset()}
    for arm in plan.arms:
        origin = plan.counted_from(arm.name)
        arms[origin] = arms.get(origin, frozenset()) | {arm.name}
    return arms


def comparisons(frames: StudyFrames) -> tuple[StudyFrames, ...]:
    """Return the study itself; a tuned study twice: at its own values, then at those found."""
    tuning = frames.plan.tuning
    if tuning is None or not tuning.done:
        return (frames,)
    at_own_values = {name: name for name in tuning.tuned}
    return tuple(
        _restricted(frames, tuning, names) for names in (at_own_values, tuning.tuned)
    )


def _restricted(
    frames: StudyFrames, tuning: LockedTuning, names: Mapping[str, str]
) -> StudyFrames:
    """Restrict a study: ``names`` maps each arm to the arm that replaces it.

    All configurations get the baseline's values, so that steps of one GEMM are still found.
    """
    plan = frames.plan
    values = {}
    for name, stand_in in names.items():
        group = tuning.group_of(name, plan.baseline)
        values[name] = group.shared if stand_in == name else group.chosen or {}
    base_values = values[plan.baseline]
    arms = []
    for name, stand_in in names.items():
        arm = plan.arm(stand_in)
        differs = arm.differs_at(base_values, values[name])
        arms.append(replace(arm, folded=plan.arm(name).folded, differs=differs))
    runs = {}
    environments = {}
    for run_id, run in frames.runs.items():
        if run.arm in names.values():
            runs[run_id] = run
            if run_id in frames.environments:
                environments[run_id] = frames.environments[run_id]
    configs = {}
    for arm_name, config in frames.configs.items():
        if arm_name in names.values():
            configs[arm_name] = config.with_training(**base_values)
    return replace(
        frames,
        plan=replace(plan, arms=tuple(arms), baseline=names[plan.baseline]),
        runs=runs,
        evals=frames.evals[frames.evals["run_id"].isin(runs)],
        configs=configs,
        environments=environments,
    )


@dataclass(frozen=True, kw_only=True)
class SetApart:
    """A run that is not pooled: the setting it differs in, its own value, and that of the others."""

    run: str
    arm: str
    setting: Setting
    own: str
    others: str


def find_set_apart(frames: StudyFrames) -> tuple[SetApart, ...]:
    """Find the runs with a result that must not be pooled, each with the first setting it differs in."""
    waived = frames.plan.waive
    tested_code = {arm.name: str(arm.differs.get("code")) for arm in frames.plan.arms}
    settings = {}
    codes: dict[str, list[str | None]] = {}
    for run_id, run in frames.runs.items():
        if run.has_result:
            config = frames.configs.get(run.arm, RecordedConfig())
            environment = frames.environments.get(run_id, Environment())
            settings[run_id] = _settings(config, environment)
            codes.setdefault(tested_code[run.arm], []).append(settings[run_id]["code"])
    others = _settings(
        frames.configs.get(frames.plan.baseline, RecordedConfig()), Environment()
    )
    for setting in _OF_MOST_RUNS:
        others[setting] = _most_common(run[setting] for run in settings.values())
    set_apart = []
    for run_id, run_settings in settings.items():
        arm = frames.runs[run_id].arm
        others["code"] = _most_common(codes[tested_code[arm]])
        for setting in get_args(Setting):
            own = run_settings[setting]
            other = others[setting]
            if setting not in waived and own and other and own != other:
                set_apart.append(
                    SetApart(
                        run=run_id, arm=arm, setting=setting, own=own, others=other
                    )
                )
                break
    return tuple(set_apart)


def _most_common(values: Iterable[str | None]) -> str | None:
    counts = Counter(values)
    del counts[None]
    return counts.most_common(1)[0][0] if counts else None


def _settings(
    config: RecordedConfig, environment: Environment
) -> dict[Setting, str | None]:
    """Return a run's value of each setting, None if its records lack it."""
    versions = (environment.ablate, environment.git_commit)
    code = environment.code or " ".join(filter(None, versions))
    world_size = None
    # Imported logs may be of any devices, so the number sets none of them apart.
    if environment.backend_mode != "imported" and environment.world_size is not None:
        world_size = str(environment.world_size)
    return {
        **configured(
            {**config.whole, "data": config.data, "training": config.training}
        ),
        "code": code or None,
        "device": trained_on(environment),
        "arithmetic": " then ".join(environment.fingerprints) or None,
        "world_size": world_size,
    }


def trained_on(environment: Environment) -> str | None:
    """Return the GPU's name or ``CPU``; None if unknown, as for imported logs."""
    if environment.backend_mode in (None, "imported"):
        return None
    return environment.gpu or "CPU"
