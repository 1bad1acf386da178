"""The throughput of each arm of a study, measured one after the other, alone on the device.

The arms are timed there and back (A B C C B A), so that a drifting clock favours none of them. This holds
only within one measurement: the record that the report reads is never combined from several.

How it fails: an arm that may not run on the device is a ``UserError``. A device that others use, or
arithmetic that is not native, is not an error: the record says that the timing is not valid for FP4 hardware.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import psutil
import torch

from ablate._version import __version__
from ablate.backends.device import device_of
from ablate.backends.select import UnfitDeviceError, fit_choices, overall_mode
from ablate.base.errors import UserError
from ablate.execute.environment import code_digest, other_work, why_not_valid
from ablate.run.command import Command
from ablate.store.records import Speed, SpeedRecord, SpeedSettings
from ablate.train.group import Layout
from ablate.train.probe import StepTimes, time_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ablate.backends.device import Device
    from ablate.plan import PlannedArm
    from ablate.run.config import RunConfig


def measure(
    study: str,
    arms: Sequence[PlannedArm],
    baseline: str,
    device: str,
    *,
    settings: SpeedSettings,
    done: Callable[[str], None] = lambda _: None,
) -> SpeedRecord:
    """Time the arms; return the content of ``throughput.json``: what was timed, where, how and when.

    ``done`` is called with the arm's name after each of its two turns.

    Raises:
        UserError: an arm that cannot run on this device, or needs several.
    """
    for arm in arms:
        _refuse_untimeable(arm)
    work_before = other_work(device)
    hardware = device_of(device)
    configs = {arm.name: arm.config.with_seed(arm.runs[0].seed) for arm in arms}
    modes: dict[str, str] = {}
    for arm in arms:
        with _named(arm):
            modes[arm.name] = overall_mode(
                fit_choices(configs[arm.name], arm.resources, device)
            )
    times = _timed(arms, configs, device, settings, done)
    others = work_before or other_work(device)
    baseline_rates = _rates(times.get(baseline, []))
    speeds = []
    for arm in arms:
        mode = modes[arm.name]
        why_not = why_not_valid(
            mode, hardware, threads=arm.resources.cpus, others=others
        )
        speeds.append(_speed(arm, times[arm.name], baseline_rates, mode, why_not))
    return SpeedRecord(
        study=study,
        device=hardware,
        code=code_digest(),
        clock_mhz=_clock_mhz(hardware),
        other_work=others,
        versions={
            "ablate": __version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "rocm": torch.version.hip,
        },
        settings=settings,
        measured_unix=time.time(),
        arms=tuple(speeds),
    )


def _timed(
    arms: Sequence[PlannedArm],
    configs: Mapping[str, RunConfig],
    device: str,
    settings: SpeedSettings,
    done: Callable[[str], None],
) -> dict[str, list[StepTimes]]:
    """Time the arms there and back; each has two turns."""
    times: dict[str, list[StepTimes]] = {arm.name: [] for arm in arms}
    threads = torch.get_num_threads()
    try:
        for arm in (*arms, *reversed(arms)):
            torch.set_num_threads(arm.resources.cpus)  # as in a run of the arm
            layout = Layout(
                checkpoint_activations=arm.resources.activation_checkpointing
            )
            with _named(arm):
                step_times = time_steps(
                    configs[arm.name], device=device, layout=layout, **asdict(settings)
                )
            times[arm.name].append(step_times)
            if torch.device(device).type != "cpu":
                torch.cuda.empty_cache()
            done(arm.name)
    finally:
        torch.set_num_threads(threads)
    return times


def _refuse_untimeable(arm: PlannedArm) -> None:
    if isinstance(arm.config.trainer, Command):
        raise UserError(
            f"arm '{arm.name}' is trained by a command, whose own log has its speed",
            hint="the report takes it from there",
        )
    if (devices := arm.resources.devices_per_run) > 1:
        raise UserError(
            f"arm '{arm.name}' trains on {devices} devices a run, and this times one (the runs' own "
            "tokens/s stand in the report; devices_per_run: 1 with a smaller batch times one device)"
        )


def _rates(times: Sequence[StepTimes]) -> list[float]:
    """Return the tokens/s of each timed step."""
    return [
        turn.tokens_per_step / seconds
        for turn in times
        for seconds in turn.sec_per_step
    ]


def _speed(
    arm: PlannedArm,
    times: Sequence[StepTimes],
    baseline_rates: Sequence[float],
    mode: str,
    why_not: str | None,
) -> Speed:
    rates = _rates(times)
    median = statistics.median(rates)
    peaks = [turn.peak_memory_bytes for turn in times if turn.peak_memory_bytes]
    return Speed(
        arm=arm.name,
        run=arm.runs[0].id,
        tokens_per_sec=tuple(rates),
        median=median,
        spread=(max(rates) - min(rates)) / median,
        over_baseline=median / statistics.median(baseline_rates)
        if baseline_rates
        else None,
        peak_memory_bytes=max(peaks, default=None),
        threads=arm.resources.cpus,
        backend_mode=mode,
        timing_valid=why_not is None,
        why_not=why_not,
    )


def _clock_mhz(device: Device) -> float | None:
    # the packages of NVML and AMD SMI may be missing
    with contextlib.suppress(Exception):
        return float(
            psutil.cpu_freq().current
            if device.kind == "cpu"
            else torch.cuda.clock_rate()
        )
    return None


@contextlib.contextmanager
def _named(arm: PlannedArm) -> Iterator[None]:
    """Name the arm in errors."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        hint = "a smaller training.micro_batch_size needs less"
        raise UserError(f"arm '{arm.name}': out of GPU memory", hint=hint) from None
    except (ValueError, UnfitDeviceError) as error:
        raise UserError(f"arm '{arm.name}': {error}") from None
