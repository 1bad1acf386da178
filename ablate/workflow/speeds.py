"""A short measurement of each arm's speed on this machine: two steps each, there and back.

It is for plans alone, which need to know about how much slower emulation is; `ablate throughput` measures for
the report.

How it fails: None where the arms cannot be timed here, or it would take minutes; an arm that cannot run on
this device is a ``UserError``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.plan import PlannedArm
    from ablate.store.records import Speed
    from ablate.workflow import Listener

_STEPS, _WARMUP, _TURNS = 2, 1, 2
_LONGEST_SEC = 60.0


def arm_speeds(
    arms: Sequence[PlannedArm], baseline: str, listener: Listener, *, seconds_per_step: float
) -> tuple[list[Speed], str | None] | None:
    """Return the arms' speeds, without evaluation, and other work that was found on the device.

    ``seconds_per_step``: about, of the baseline; the whole must take less than a minute if arms were as fast.
    """
    from ablate.backends.device import default_device

    device = default_device()
    fits = all(
        one.config.trainer is None
        and one.resources.devices_per_run == 1
        and (one.resources.gpus > 0) == (device != "cpu")
        for one in arms
    )
    if not fits or (_STEPS + _WARMUP) * _TURNS * len(arms) * seconds_per_step > _LONGEST_SEC:
        return None
    from ablate.execute.throughput import measure
    from ablate.store.records import SpeedSettings

    listener.say("Timing two steps of each arm on this machine …")
    settings = SpeedSettings(steps=_STEPS, warmup=_WARMUP, repeats=1)
    return measure(arms, baseline, device, settings=settings)
