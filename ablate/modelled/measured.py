"""Public measurements of training speed that the speed model is calibrated on.

Tokens per second are of one device. Steps are whole: forward, backward, optimizer and communication, without
evaluation. All have a bf16 head; those in NVFP4 have FP8 attention (by their configurations), the others bf16
attention. ``benchmarks/speed_model.py`` has measurements that no rate was chosen by.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ablate.modelled.speed import LLAMA_8B, TokenTime, Workload, token_time
from ablate.recipes import PRESETS, Recipe


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
        """The modelled time of a token."""
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
"""Llama 3.1 8B of MLPerf Training v5.1 on eight devices, which share data alone: the fastest submission of
each hardware and format, the median of its ten logs' medians, as ``ablate import`` reads them. Source:
mlcommons/training_results_v5.1, commit 441d65f."""
