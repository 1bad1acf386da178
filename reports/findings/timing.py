"""Which timing counts: that of the runs themselves, and that of ``ablate throughput``.

A run's record says whether its timing is valid; that runs shared a device, only the ledgers of all of them
show. The record of ``ablate throughput`` counts for an arm only where it is native, was taken on an idle and
undivided device, and has the configuration, code and kind of device of the arm's runs.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ablate.results.pooling import trained_on

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ablate.results.frames import StudyFrames
    from ablate.store.leases import Attempt
    from ablate.store.plan_file import LockedPlan
    from ablate.store.records import Environment, Speed, SpeedRecord

_TURNS = 2
"""``ablate throughput`` goes through the arms there and back."""


@dataclass(frozen=True, kw_only=True)
class RunTiming:
    """The runs' own timing. ``native``: in every run, unshared. ``reasons``: why not, with numbers of runs.

    ``unvouched``: native arithmetic, but not known to be unshared. ``logged``: read from others' logs.
    ``untold``: of logged runs, why an arm's speed cannot be set beside the baseline's, by arm.
    """

    kind: Literal["native", "unvouched", "emulated", "logged"]
    reasons: tuple[tuple[str, int], ...] = ()
    untold: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """What ``ablate throughput`` measured, as far as it counts.

    ``tokens_per_sec``: of every repeat, by arm; the baseline's is among them or there are none. ``not_used``:
    why not, by arm. ``steps``: of a repeat. ``repeats``: of an arm.
    """

    device: str
    arch: str
    versions: dict[str, str | None]
    steps: int
    repeats: int
    measured_unix: float
    tokens_per_sec: dict[str, tuple[float, ...]]
    not_used: dict[str, str]


def timing_of_runs(
    environments: Mapping[str, Environment], attempts: Mapping[str, Attempt], plan: LockedPlan
) -> RunTiming:
    """Return whether every run that ran vouches for its timing, and what speaks against it."""
    if any(environment.backend_mode == "imported" for environment in environments.values()):
        return RunTiming(kind="logged", untold=_untold(plan))
    reasons: Counter[str] = Counter()
    emulated = False
    for environment in environments.values():
        mode = environment.backend_mode
        if mode != "native":
            emulated = True
            reasons[f"{mode or 'unknown'} arithmetic"] += 1
        elif not environment.timing_valid:
            reasons[environment.timing_why_not or "a record that does not vouch for it"] += 1
    reasons.update(runs_at_once(environments, attempts).values())
    if not environments:
        reasons["no record of what the runs ran on"] += 1
        emulated = True
    if not reasons:
        return RunTiming(kind="native")
    return RunTiming(kind="emulated" if emulated else "unvouched", reasons=tuple(reasons.items()))


def _untold(plan: LockedPlan) -> dict[str, str]:
    """Return the arms whose logs do not say that they had the baseline's hardware, and what they say."""
    pairs = {arm.name: arm.differs.get("hardware") for arm in plan.arms}
    # Read against another arm, what arms differ in is told from that one.
    base = next((pair[0] for pair in pairs.values() if pair), plan.training.get("hardware"))
    found = {}
    for name, pair in pairs.items():
        own = pair[1] if pair else base
        if own is None or base is None:
            whose = plan.baseline if base is None else name
            found[name] = (
                f"the logs of {whose} do not tell one kind and number of devices (`ablate import --hardware`)"
            )
        elif own != base:
            found[name] = f"{name} was trained on {own}, {plan.baseline} on {base}"
    if len(found) == len(plan.arms) - 1:
        found.setdefault(plan.baseline, "no arm to compare it with")
    return found


def runs_at_once(environments: Mapping[str, Environment], attempts: Mapping[str, Attempt]) -> dict[str, str]:
    """Return the runs whose last attempt shared its device with others of the study, and how.

    A GPU is shared by two runs, a processor by runs that have more threads together than it has cores.
    """
    devices: dict[str, list[_Span]] = {}
    for run_id, environment in environments.items():
        attempt = attempts.get(run_id)
        if attempt is None:
            continue
        # One that is not known to have ended may still be at work.
        end = math.inf if attempt.ended_unix is None else attempt.ended_unix
        if environment.gpu is None:
            threads, cores = environment.threads, environment.cpus_visible
            if threads and cores:
                span = _Span(run_id, attempt.started_unix, end, threads, cores)
                devices.setdefault(attempt.machine, []).append(span)
        elif uuid := environment.gpu_uuid:
            devices.setdefault(uuid, []).append(_Span(run_id, attempt.started_unix, end, 1, None))
    most: dict[str, tuple[int, int, int | None]] = {}
    for spans in devices.values():
        active: list[_Span] = []
        for span in sorted(spans, key=lambda span: span.start):
            active = [other for other in active if other.end > span.start] + [span]
            load = sum(other.load for other in active)
            for other in active:
                if other.run_id not in most or most[other.run_id][0] < load:
                    most[other.run_id] = (load, len(active), span.cores)
    return {
        run_id: f"{count} runs at once on {_named(cores)}"
        for run_id, (load, count, cores) in most.items()
        if count > 1 and load > (cores or 1)
    }


@dataclass(frozen=True)
class _Span:
    """One run on one device; ``cores``: of a processor, None for a GPU."""

    run_id: str
    start: float
    end: float
    load: int
    cores: int | None


def _named(cores: int | None) -> str:
    if cores is None:
        return "one GPU"
    return "one CPU core" if cores == 1 else f"{cores} CPU cores"


def judge_throughput(
    frames: StudyFrames, *, left_out: Collection[str], waived: Collection[str]
) -> Throughput | None:
    """Return the record of ``ablate throughput``, None where there is none.

    ``left_out``: the runs that are not pooled. ``waived``: settings in which runs may differ.
    """
    record = frames.throughput
    if record is None:
        return None
    timed = {one.arm: one for one in record.arms}
    results = frames.runs[frames.runs["state"].isin(("finished", "diverged"))]
    pooled = {str(run_id) for run_id in results["run_id"]} - set(left_out)
    rates: dict[str, tuple[float, ...]] = {}
    refused: dict[str, str] = {}
    for arm in frames.plan.arms:
        name, ids = arm.name, [run.id for run in arm.runs]
        ran = [frames.environments[run_id] for run_id in ids if run_id in pooled & frames.environments.keys()]
        reason = _why_not(timed.get(name), record, ids=ids, ran=ran, any_code="code" in waived)
        if reason is None:
            rates[name] = timed[name].tokens_per_sec
        else:
            refused[name] = reason
    if frames.plan.baseline not in rates:
        refused |= dict.fromkeys(rates, "no baseline to compare it with")
        rates = {}
    return Throughput(
        device=record.device.name,
        arch=record.device.arch,
        versions=record.versions,
        steps=record.settings.steps,
        repeats=_TURNS * record.settings.repeats,
        measured_unix=record.measured_unix,
        tokens_per_sec=rates,
        not_used=refused,
    )


def _why_not(
    timed: Speed | None,
    record: SpeedRecord,
    *,
    ids: Sequence[str],
    ran: Sequence[Environment],
    any_code: bool,
) -> str | None:
    """Say why an arm's timing does not count, None where it does. ``ran``: what its runs ran on."""
    if timed is None:
        return "not timed"
    if timed.backend_mode != "native":
        return f"{timed.backend_mode} arithmetic"
    if not timed.timing_valid:
        return timed.why_not or "a record that does not vouch for it"
    if timed.run not in ids:
        return "timed with another configuration than its runs have"
    for environment in ran:
        if environment.backend_mode != "native":
            return f"its runs had {environment.backend_mode or 'unknown'} arithmetic"
        device = trained_on(environment)
        if device != record.device.name:
            return f"timed on {record.device.name}, trained on {device}"
        if environment.code != record.code and not any_code:
            return "timed with other code than trained its runs"
    return None
