"""How each run of a study has ended, which runs may be compared, and the comparisons that a study holds.

Runs may be averaged and compared if they differ only in what the study compares. A run's id covers its
configuration but not the code that trained it, and an arm may override the baseline's data or evaluation. So
a run is set apart (not counted as a result, named in the report) if it differs in

- ``data``, ``tokenizer``, ``evaluation``: from the baseline's configuration;
- ``code``: from the sources that trained most runs of the study;
- ``device``: from the GPU model (or CPU) that most runs were trained on;
- ``arithmetic``: from the fingerprint of most runs (``ablate.execute.environment``), also if a run was
  resumed on a machine with another fingerprint;
- ``world_size``: from the number of devices that most runs had.

A study that wants such a difference waives it by name. A value missing from a record counts as equal.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from ablate.results.losses import Curve
from ablate.run.config import Setting, configured
from ablate.run.outcome import LocalFit, outcome
from ablate.run.schedule import steady_spans
from ablate.store.records import Environment, RecordedConfig

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from ablate.results.frames import StudyFrames
    from ablate.store.plan_file import LockedPlan, LockedTuning


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
        return self.end == "hit" and not self.exact

    @property
    def last_loss(self) -> float | None:
        """Nats per token."""
        return float(self.loss[-1]) if len(self.loss) else None


def run_ends(frames: StudyFrames, apart: Collection[str], origin: int = 0) -> Iterator[RunResult]:
    """Yield how each run has ended, in the order of the plan; runs ``apart`` do not count as results.

    ``origin``: the token count from which tokens to target are counted; earlier evaluations are left out.
    """
    target = frames.plan.target
    steady = {arm: _steady(config) for arm, config in frames.configs.items()}
    whole_steps = {arm.name: arm.tokens for arm in frames.plan.arms}
    evals = frames.evals[frames.evals["tokens"] >= origin]
    of_run = {str(run_id): group for run_id, group in evals.groupby("run_id", sort=False)}
    for run_id, ran in frames.runs.items():
        status, environment = ran.status, frames.environments.get(run_id)
        group = of_run.get(run_id, evals.iloc[:0])
        tokens, loss = group["tokens"].to_numpy(dtype=np.int64), group["val_loss"].to_numpy(dtype=float)
        fit = LocalFit(tokens, loss, [(max(start, origin), end) for start, end in steady.get(ran.arm, ())])
        end = outcome(
            seed=ran.seed,
            state="set apart" if run_id in apart else status.state,
            tokens=tokens,
            loss=loss,
            target=None if target is None else target.val_loss,
            rule="confirmed" if target is None else target.crossing,
            budget_tokens=float(ran.budget or 0),
            fit=fit,
        ).after(origin)
        started, ended = status.started_unix, status.ended_unix
        yield RunResult(
            **vars(end),
            run_id=run_id,
            arm=ran.arm,
            tokens=tokens,
            loss=loss,
            fit=fit,
            origin=origin,
            state=status.state,
            # The status is written at the end of an attempt; a killed attempt may have later evaluations.
            trained=max(status.tokens, int(tokens[-1]) if len(tokens) else 0),
            budget=whole_steps[ran.arm] or ran.budget or 0,
            message=status.message,
            seconds=None if started is None or ended is None else ended - started,
            tokens_per_sec=ran.tokens_per_sec,
            devices=(environment and environment.world_size) or 1,
            backend_mode=None if environment is None else environment.backend_mode,
        )


def _steady(config: RecordedConfig) -> tuple[tuple[float, float], ...]:
    """Return the spans of tokens in which an arm's training does not change; empty where unknown."""
    if config.whole.get("trainer") is not None:  # the user's own trainer may follow another schedule
        return ()
    training, recipe = config.training or {}, config.recipe or {}
    total = training.get("tokens") or 0
    phases = [*(recipe.get("phases") or ()), *filter(None, [recipe.get("deoscillate")])]
    switches = [
        phase.get("from_tokens") or round((phase.get("from_fraction") or 0.0) * total) for phase in phases
    ]
    fork = config.whole.get("fork")
    if isinstance(fork, dict) and isinstance(fork.get("tokens"), int):
        switches.append(fork["tokens"])
    return steady_spans(training, switches)


def origins(plan: LockedPlan) -> dict[int, frozenset[str]]:
    """Map each token count from which costs are counted to the arms counted from it; always includes 0."""
    found: dict[int, set[str]] = {0: set()}
    for arm in plan.arms:
        found.setdefault(plan.counted_from(arm.name), set()).add(arm.name)
    return {origin: frozenset(names) for origin, names in found.items()}


def comparisons(frames: StudyFrames) -> tuple[StudyFrames, ...]:
    """Return the study itself; a tuned study twice: at its own values, then at those found."""
    tuning = frames.plan.tuning
    if tuning is None or not tuning.done:
        return (frames,)
    return tuple(_part(frames, tuning, names) for names in ({one: one for one in tuning.tuned}, tuning.tuned))


def _part(frames: StudyFrames, tuning: LockedTuning, names: Mapping[str, str]) -> StudyFrames:
    """Restrict a study: ``names`` maps each arm to the arm that replaces it.

    All configurations get the baseline's values, so that steps of one GEMM are still found.
    """
    plan = frames.plan
    values = {}
    for name, stand_in in names.items():
        group = tuning.group_of(name, plan.baseline)
        values[name] = group.shared if stand_in == name else group.chosen or {}
    usual = values[plan.baseline]
    arms = []
    for name, stand_in in names.items():
        arm = plan.arm(stand_in)
        differs = arm.differs_at(usual, values[name])
        arms.append(replace(arm, folded=plan.arm(name).folded, differs=differs))
    wanted = {run.id for arm in arms for run in arm.runs}
    of_runs: dict[str, Any] = {
        name: {key: value for key, value in getattr(frames, name).items() if key in wanted}
        for name in ("runs", "environments")
    }
    configs = frames.configs.items()
    return replace(
        frames,
        plan=replace(plan, arms=tuple(arms), baseline=names[plan.baseline]),
        evals=frames.evals[frames.evals["run_id"].isin(wanted)],
        configs={arm: one.with_training(**usual) for arm, one in configs if arm in names.values()},
        **of_runs,
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
    unknown, nowhere = RecordedConfig(), Environment()
    marks = {
        run_id: _marks(frames.configs.get(ran.arm, unknown), frames.environments.get(run_id, nowhere))
        for run_id, ran in frames.runs.items()
        if ran.has_result
    }
    others = _marks(frames.configs.get(frames.plan.baseline, unknown), nowhere)
    of_most: tuple[Setting, ...] = ("code", "device", "arithmetic", "world_size")
    for setting in of_most:
        counts = Counter(value for own in marks.values() if (value := own[setting]) is not None)
        others[setting] = counts.most_common(1)[0][0] if counts else None
    found = []
    for run_id, own in marks.items():
        for setting in get_args(Setting):
            mine, theirs, arm = own[setting], others[setting], frames.runs[run_id].arm
            if (
                setting not in frames.plan.waive
                and mine is not None
                and theirs is not None
                and mine != theirs
            ):
                found.append(SetApart(run=run_id, arm=arm, setting=setting, own=mine, others=theirs))
                break
    return tuple(found)


def _marks(config: RecordedConfig, environment: Environment) -> dict[Setting, str | None]:
    """Return a run's value of each setting, None if its records lack it."""
    # Imported logs may be of any devices, so the number sets none of them apart.
    world_size = None if environment.backend_mode == "imported" else environment.world_size
    return {
        **configured({**config.whole, "data": config.data, "training": config.training}),
        "code": environment.code
        or " ".join(filter(None, (environment.ablate, environment.git_commit)))
        or None,
        "device": trained_on(environment),
        "arithmetic": " then ".join(environment.fingerprints) or None,
        "world_size": None if world_size is None else str(world_size),
    }


def trained_on(environment: Environment) -> str | None:
    """Return the GPU's name or ``CPU``; None if unknown, as for imported logs."""
    if environment.backend_mode in (None, "imported"):
        return None
    return environment.gpu or "CPU"
