"""How far off the modelled speed may be, judged by its errors on the steps that it is calibrated on.

The steps (``CALIBRATION``) are public measurements of training speed. Tokens per second are per device.
Steps are whole: forward, backward, optimizer and communication, without evaluation. All have a bf16 head;
those in NVFP4 have FP8 attention (by their configurations), the others bf16 attention.
``benchmarks/speed_model.py`` has more measurements, by which no rate was chosen.

Each kind of kernel (``speed.Kernel``) is assumed to be off by its own factor exp(s ε), with independent
standard normal ε: devices, software and shapes differ. The log of a step's time is then off by
s √(Σ share²), over the shares of the kernels in it, and the log of a speed-up by
s √(Σ (difference of shares)²): what both recipes have in common cancels.

s² = Σ (r² / Σ share²) / (n − 2) over the n steps, where r is the log of modelled over measured time, and 2 is
the number of rates chosen by these steps. Ranges are 95 %, by Student's t with n − 2 degrees of freedom.
They hold for well-tuned data-parallel steps on a few devices, not for what ``speed`` leaves out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist
from typing import TYPE_CHECKING

from ablate.modelled.speed import LLAMA_8B, TokenTime, Workload, token_time
from ablate.recipes import PRESETS, Recipe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ablate.modelled.speed import Kernel


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """A measured training step; ``logs``: the submitter and system of its MLPerf logs.

    ``why``: what is unknown or left out, where the model is more than 10 % off.
    """

    what: str
    source: str
    hardware: str
    work: Workload
    recipe: Recipe
    tokens_per_sec: float
    logs: str | None = None
    why: str = ""

    @property
    def time(self) -> TokenTime:
        """The modelled time of a token on the hardware of the measurement."""
        found = token_time(self.work, self.recipe, self.hardware)
        assert found is not None  # measured there, so it has every unit
        return found

    @property
    def deviation(self) -> float:
        """Modelled over measured tokens per second, minus one."""
        return 1 / self.time.total / self.tokens_per_sec - 1


FP8 = PRESETS["te-hybrid-fp8"].recipe
NVFP4 = replace(PRESETS["nvidia-nvfp4"].recipe, rules=())  # here no block is in bf16
LOW_POWER = "its power limit, 1,000 W where MI355X has 1,400 W, stands in no published peak"


def _mlperf(
    hardware: str, logs: str, recipe: Recipe, batch: int, tokens_per_sec: float, why: str = ""
) -> TimedStep:
    eight = recipe is NVFP4
    return TimedStep(
        what=f"Llama 3.1 8B, {'NVFP4, FP8 attention' if eight else 'FP8'}, batch {batch}",
        source=f"MLPerf Training v5.1, {logs}",
        hardware=hardware,
        work=replace(LLAMA_8B, tokens_per_step=batch * 8192, fp8_attention=eight),
        recipe=recipe,
        tokens_per_sec=tokens_per_sec,
        logs=logs,
        why=why,
    )


CALIBRATION: tuple[TimedStep, ...] = (
    _mlperf("B200", "University-of-Florida/hpg.dgxb200x8.n1", FP8, 16, 30_120),
    _mlperf("B200", "Lenovo/SR680aV3-8xB200_SXM_180GB", NVFP4, 16, 36_926),
    _mlperf("B300", "Dell/1xXE9780x8B300-SXM-270GB", FP8, 16, 29_900),
    _mlperf("B300", "Nebius/nebius_b300_n1", NVFP4, 16, 41_571),
    _mlperf("GB200", "NVIDIA/tyche_ngpu8_ngc25.09_nemo", NVFP4, 16, 40_408),
    _mlperf("GB300", "NVIDIA/theia_ngpu8_ngc25.09_nemo", NVFP4, 16, 47_272),
    _mlperf("MI355X", "AMD/MI355X_EPYC_9575F_pytorch", FP8, 32, 31_423),
    _mlperf("MI350X", "AMD/MI350X_EPYC_9575F_pytorch", FP8, 32, 25_515, LOW_POWER),
)
"""Llama 3.1 8B of MLPerf Training v5.1 on eight data-parallel devices: the fastest submission of each
hardware and format, the median of its ten logs' medians, as ``ablate import`` reads them. Source:
mlcommons/training_results_v5.1, commit 441d65f."""

_CHOSEN = 2
"""Number of rates chosen by the steps: attention's two."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """An estimate with its 95 % range."""

    estimate: float
    low: float
    high: float

    def times(self, factor: float) -> Range:
        """Multiply the estimate and its range."""
        return Range(estimate=self.estimate * factor, low=self.low * factor, high=self.high * factor)


def seconds_range(time: TokenTime) -> Range:
    """Model the seconds per token of a whole step, with their range."""
    return _range(time.total, _shares(time.by_kernel()))


def speed_up(slow: Mapping[Kernel, float], fast: Mapping[Kernel, float]) -> Range:
    """Model how many times faster ``fast`` is than ``slow``, both in seconds by kind of kernel."""
    one, other = _shares(slow), _shares(fast)
    apart = {kernel: one.get(kernel, 0.0) - other.get(kernel, 0.0) for kernel in {**one, **other}}
    return _range(sum(slow.values()) / sum(fast.values()), apart)


@cache
def kernel_spread() -> float:
    """Compute s, the standard deviation of the log of a kernel's speed."""
    squares = (
        math.log1p(step.deviation) ** 2 / _square(_shares(step.time.by_kernel())) for step in CALIBRATION
    )
    return math.sqrt(sum(squares) / (len(CALIBRATION) - _CHOSEN))


def _range(estimate: float, shares: Mapping[Kernel, float]) -> Range:
    reach = student(0.975, len(CALIBRATION) - _CHOSEN) * kernel_spread() * math.sqrt(_square(shares))
    return Range(estimate=estimate, low=estimate * math.exp(-reach), high=estimate * math.exp(reach))


def _shares(seconds: Mapping[Kernel, float]) -> dict[Kernel, float]:
    total = sum(seconds.values())
    return {kernel: part / total for kernel, part in seconds.items()}


def _square(shares: Mapping[Kernel, float]) -> float:
    return sum(share**2 for share in shares.values())


def student(share: float, degrees: float) -> float:
    """Compute a quantile of Student's t to 1 % from 2 degrees of freedom up (Fisher and Cornish 1960)."""
    z = NormalDist().inv_cdf(share)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, 1))
