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
    from collections.abc import Callable, Iterator, Sequence

    from ablate.plan import PlannedArm


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
        if isinstance(arm.config.trainer, Command):
            what = f"arm '{arm.name}' is trained by a command, whose own log has its speed"
            raise UserError(what, hint="the report takes it from there")
        if (devices := arm.resources.devices_per_run) > 1:
            raise UserError(
                f"arm '{arm.name}' trains on {devices} devices a run, and this times one (the runs' own "
                "tokens/s stand in the report; devices_per_run: 1 with a smaller batch times one device)"
            )
    others, where = other_work(device), device_of(device)
    configs = {arm.name: arm.config.with_seed(arm.runs[0].seed) for arm in arms}
    modes = {}
    for arm in arms:
        with _named(arm):
            modes[arm.name] = overall_mode(fit_choices(configs[arm.name], arm.resources, device))
    times: dict[str, list[StepTimes]] = {arm.name: [] for arm in arms}
    threads = torch.get_num_threads()
    try:
        for arm in (*arms, *reversed(arms)):
            torch.set_num_threads(arm.resources.cpus)  # as in a run of the arm
            layout = Layout(checkpoint_activations=arm.resources.activation_checkpointing)
            with _named(arm):
                timed = time_steps(configs[arm.name], device=device, layout=layout, **asdict(settings))
            times[arm.name].append(timed)
            if where.kind != "cpu":
                torch.cuda.empty_cache()
            done(arm.name)
    finally:
        torch.set_num_threads(threads)
    others = others or other_work(device)
    rates = {
        name: tuple(one.tokens_per_step / seconds for one in found for seconds in one.sec_per_step)
        for name, found in times.items()
    }
    medians = {name: statistics.median(own) for name, own in rates.items()}
    speeds = []
    for arm in arms:
        own, median, cpus = rates[arm.name], medians[arm.name], arm.resources.cpus
        why_not = why_not_valid(modes[arm.name], where, threads=cpus, others=others)
        speed = Speed(
            arm=arm.name,
            run=arm.runs[0].id,
            tokens_per_sec=own,
            median=median,
            spread=(max(own) - min(own)) / median,
            over_baseline=median / medians[baseline] if baseline in medians else None,
            peak_memory_bytes=max(
                filter(None, (one.peak_memory_bytes for one in times[arm.name])), default=None
            ),
            threads=cpus,
            backend_mode=modes[arm.name],
            timing_valid=why_not is None,
            why_not=why_not,
        )
        speeds.append(speed)
    clock_mhz = None
    with contextlib.suppress(Exception):  # the packages of NVML and AMD SMI may be missing
        clock_mhz = float(psutil.cpu_freq().current if where.kind == "cpu" else torch.cuda.clock_rate())
    return SpeedRecord(
        study=study,
        device=where,
        code=code_digest(),
        clock_mhz=clock_mhz,
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
