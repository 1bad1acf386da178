"""Public measurements of training speed: what the speed model is calibrated on, and what it has not seen.

Tokens per second are of one device. Steps are whole: forward, backward, optimizer and communication, without
evaluation. All have a bf16 head; those of MLPerf in NVFP4 have FP8 attention (by their configurations), the
others bf16 attention. ``spread`` compares.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ablate.modelled.speed import (
    BACKWARD,
    LLAMA_8B,
    Kernel,
    Part,
    Rate,
    TokenTime,
    Workload,
    token_time,
)
from ablate.recipes import PRESETS, GemmPolicy, LayerRecipe, LayerRule, OperandPolicy, Recipe
from ablate.run.config import ModelConfig

_TOKENS, _WIDTH = 15_872, 4096
_OUTPUTS = 12 * _WIDTH  # of a block's layers if each had _WIDTH inputs: 3 + 1 + 4 + 4
_BLOCK_FLOPS = 6.0 * _TOKENS * _WIDTH * _OUTPUTS
_X, _W, _DY = _TOKENS * 7 * _WIDTH, _WIDTH * _OUTPUTS, _TOKENS * 9 * _WIDTH
_CASTS = 2.0 * (_X + _W + _DY)  # there each GEMM quantises both of its operands anew


def _of_arithmetic(ms: float, peak: float) -> float:
    return _BLOCK_FLOPS / (ms / 1e3) / (peak * 1e12)


def _of_memory(ms: float, ms_without: float, bytes_each: float) -> float:
    return _CASTS * bytes_each / ((ms - ms_without) / 1e3) / 8e12


KERNELS: tuple[tuple[str, Rate, float], ...] = (
    ("GEMMs in BF16", "gemm16", _of_arithmetic(13.102, 2250)),
    ("GEMMs in FP8", "gemm8", _of_arithmetic(6.812, 4500)),
    ("GEMMs in MXFP8", "gemm8", _of_arithmetic(7.161, 4500)),
    ("GEMMs in NVFP4", "gemm4", _of_arithmetic(3.764, 13_500)),
    ("quantising to FP8, current scales", "memory", _of_memory(9.147, 6.812, 2 * 2 + 1)),
    ("quantising to FP8, delayed scales", "memory", _of_memory(7.802, 6.812, 2 + 1)),
    ("quantising to MXFP8", "memory", _of_memory(8.984, 7.161, 2 + 1 + 1 / 32)),
    ("quantising to NVFP4", "memory", _of_memory(6.453, 3.764, 2 * 2 + 0.5 + 1 / 16)),
)
"""(what, rate, share of B300's peak), from milliseconds of all three GEMMs of one block's linear layers
(width 4,096, feed-forward 16,384, 15,872 tokens), with operands quantised beforehand and without. Source:
TransformerEngine, docs/examples/gemm_profiling/gemm_profiling.rst, commit 8f2e635."""


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """A measured training step; ``logs``: the submitter and system of its MLPerf logs.

    ``why``: as of ``SpeedUp``.
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
        return _time(self.work, self.recipe, self.hardware)

    @property
    def deviation(self) -> float:
        """Modelled over measured tokens per second, minus one."""
        return 1 / self.time.total / self.tokens_per_sec - 1


@dataclass(frozen=True, kw_only=True)
class SpeedUp:
    """A published speed-up of ``fast`` over ``slow``; ``at_least``: the source gives a lower bound.

    ``parts``: those of the step that were compared, all if empty. ``why``: what is unknown or left out, where
    the model is more than 10 % off.
    """

    what: str
    source: str
    published: float
    hardware: str
    work: Workload
    slow: Recipe
    fast: Recipe
    at_least: bool = False
    parts: tuple[Part, ...] = ()
    why: str = ""

    @property
    def times(self) -> tuple[dict[Kernel, float], dict[Kernel, float]]:
        """The modelled seconds of the slow and of the fast recipe, by kind of kernel."""
        slow, fast = (_time(self.work, one, self.hardware) for one in (self.slow, self.fast))
        return slow.by_kernel(*self.parts), fast.by_kernel(*self.parts)


def _time(work: Workload, recipe: Recipe, hardware: str) -> TokenTime:
    found = token_time(work, recipe, hardware)
    assert found is not None  # measured there, so it has every unit
    return found


_FP8 = PRESETS["te-hybrid-fp8"].recipe
_MXFP8_GEMM = GemmPolicy(left=OperandPolicy(format="mxfp8"), right=OperandPolicy(format="mxfp8"))
_MXFP8 = Recipe(fprop=_MXFP8_GEMM, dgrad=_MXFP8_GEMM, wgrad=_MXFP8_GEMM)
_MXFP4 = PRESETS["amd-fdw-dht16"].recipe
_NVFP4 = replace(PRESETS["nvidia-nvfp4"].recipe, rules=())  # here no block is in bf16
_NAMES = {_FP8: "FP8", _MXFP8: "MXFP8", _NVFP4: "NVFP4"}
_LLAMA_70B = ModelConfig(width=8192, layers=80, heads=64, kv_heads=8, ffn=28_672, tied_head=False)
_LLAMA_70B_BLOCK = Workload(
    model=replace(_LLAMA_70B, layers=1), vocab_size=1, seq_len=4096, tokens_per_step=4 * 4096
)
"""One decoder block of Llama 2 70B with a negligible head: the shapes of the estimate by Tseng et al."""
_LLAMA_405B = ModelConfig(width=16_384, layers=126, heads=128, kv_heads=8, ffn=53_248, tied_head=False)
_DEEPSEEK_16B = ModelConfig(
    width=2048, layers=27, heads=16, ffn=1408, experts=66, experts_per_token=8, tied_head=False
)


def _llama(
    batch: int, *, model: ModelConfig | None = None, devices: int = 8, attention8: bool = False
) -> Workload:
    """Return Llama 3 with a global batch of so many sequences of 8,192 tokens."""
    return replace(
        LLAMA_8B,
        model=model or LLAMA_8B.model,
        tokens_per_step=batch * 8192,
        devices=devices,
        fp8_attention=attention8,
    )


_LOW_POWER = "its power limit, 1,000 W where MI355X has 1,400 W, stands in no published peak"


def _mlperf(
    hardware: str, logs: str, recipe: Recipe, batch: int, tokens_per_sec: float, why: str = ""
) -> TimedStep:
    eight = recipe is _NVFP4
    return TimedStep(
        what=f"Llama 3.1 8B, {'NVFP4, FP8 attention' if eight else 'FP8'}, batch {batch}",
        source=f"MLPerf Training v5.1, {logs}",
        hardware=hardware,
        work=_llama(batch, attention8=eight),
        recipe=recipe,
        tokens_per_sec=tokens_per_sec,
        logs=logs,
        why=why,
    )


CALIBRATION: tuple[TimedStep, ...] = (
    _mlperf("B200", "University-of-Florida/hpg.dgxb200x8.n1", _FP8, 16, 30_120),
    _mlperf("B200", "Lenovo/SR680aV3-8xB200_SXM_180GB", _NVFP4, 16, 36_926),
    _mlperf("B300", "Dell/1xXE9780x8B300-SXM-270GB", _FP8, 16, 29_900),
    _mlperf("B300", "Nebius/nebius_b300_n1", _NVFP4, 16, 41_571),
    _mlperf("GB200", "NVIDIA/tyche_ngpu8_ngc25.09_nemo", _NVFP4, 16, 40_408),
    _mlperf("GB300", "NVIDIA/theia_ngpu8_ngc25.09_nemo", _NVFP4, 16, 47_272),
    _mlperf("MI355X", "AMD/MI355X_EPYC_9575F_pytorch", _FP8, 32, 31_423),
    _mlperf("MI350X", "AMD/MI350X_EPYC_9575F_pytorch", _FP8, 32, 25_515, _LOW_POWER),
)
"""Llama 3.1 8B of MLPerf Training v5.1 on eight devices, which share data alone: the fastest submission of
each hardware and format, the median of its ten logs' medians, as ``ablate import`` reads them. Source:
mlcommons/training_results_v5.1, commit 441d65f."""


def _nemo(hardware: str, recipe: Recipe, tokens_per_sec: float, why: str = "") -> TimedStep:
    return TimedStep(
        what=f"Llama 3 8B, {_NAMES[recipe]}, batch 128",
        source="Megatron-Bridge, performance summary, 25.11 container",
        hardware=hardware,
        work=_llama(128),
        recipe=recipe,
        tokens_per_sec=tokens_per_sec,
        why=why,
    )


def _primus(hardware: str, tokens_per_sec: float, why: str = "") -> TimedStep:
    return TimedStep(
        what="Llama 3.1 8B, MXFP4 with DHT16, batch 32",
        source=f"MLPerf Training v6.0, AMD/{hardware}_EPYC_9575F_primus, result_0",
        hardware=hardware,
        work=_llama(32),
        recipe=_MXFP4,
        tokens_per_sec=tokens_per_sec,
        why=why,
    )


_SAME_PEAKS = (
    "GB300 is 19 to 21 % faster there than GB200: it has more power and computes twice as many exponentials, "
    "but has the same published peaks of FP8 and memory"
)

HELD_OUT: tuple[TimedStep, ...] = (
    _primus("MI355X", 37_515),
    _primus("MI350X", 30_117, _LOW_POWER),
    _nemo("B200", _FP8, 30_624),
    _nemo("B200", _MXFP8, 29_521),
    _nemo("GB200", _FP8, 31_508),
    _nemo("GB200", _MXFP8, 29_789, _SAME_PEAKS),
    _nemo("GB300", _FP8, 37_556, _SAME_PEAKS),
    _nemo("GB300", _MXFP8, 36_108),
    _nemo("H100", _FP8, 14_451, "the shares of peaks are those of later devices"),
)
"""Steps that no rate was chosen by, of eight devices each. Megatron-Bridge: docs/performance-summary.md,
commit 00b7660. MLPerf v6.0: Richardyu114/training_results_v6.0, commit eabf23a, by the times between
evaluations."""

_BRIDGE = "Megatron-Bridge, performance summary archive, {} container"
_PARALLEL = "the cost of the parallelism is not told, nor whether attention was in FP8"
_TORCHAO = "torchao/prototype/mx_formats/README.md (commit 09f1325)"
_ATTENTION_MXFP8 = LayerRule(
    match="*.attention.*",
    recipe=LayerRecipe(fprop=_MXFP8_GEMM, dgrad=_MXFP8_GEMM, wgrad=_MXFP8_GEMM),
)


def _bridge(
    hardware: str, size: str, fast: Recipe, slow: Recipe, rates: tuple[float, float], split: str
) -> SpeedUp:
    model, batch, devices = {"70B": (_LLAMA_70B, 256, 64), "405B": (_LLAMA_405B, 1536, 256)}[size]
    return SpeedUp(
        what=f"Llama 3 {size}, {_NAMES[fast]} over {_NAMES[slow]}, {devices} devices ({split})",
        source=_BRIDGE.format("26.04.01" if size == "70B" else "26.06"),
        published=rates[0] / rates[1],
        hardware=hardware,
        work=_llama(batch, model=model, devices=devices),
        slow=slow,
        fast=fast,
        why=_PARALLEL,
    )


SPEED_UPS: tuple[SpeedUp, ...] = (
    SpeedUp(
        what="Llama 3.1 8B, MXFP4 with DHT16 on all GEMMs over FP8",
        source="AMD, arXiv 2605.09825",
        published=1.20,
        hardware="MI355X",
        work=LLAMA_8B,
        slow=_FP8,
        fast=_MXFP4,
    ),
    _bridge("GB300", "70B", _NVFP4, _MXFP8, (7296, 4864), "tensor 1, pipeline 4"),
    _bridge("GB200", "70B", _NVFP4, _MXFP8, (4864, 3712), "tensor 2, pipeline 4"),
    _bridge("GB300", "405B", _NVFP4, _FP8, (1413, 1048), "tensor 4, pipeline 8"),
    _bridge("GB200", "405B", _NVFP4, _MXFP8, (1166, 783), "tensor 4, pipeline 16"),
    SpeedUp(
        what="Llama 3 8B, FP8 over BF16",
        source=_TORCHAO,
        published=1.254,
        hardware="B200",
        work=_llama(8),
        slow=Recipe(),
        fast=_FP8,
    ),
    SpeedUp(
        what="Llama 3 8B, MXFP8 over BF16",
        source=_TORCHAO,
        published=1.200,
        hardware="B200",
        work=_llama(8),
        slow=Recipe(),
        fast=_MXFP8,
        why="an early casting kernel; the devices' power was limited, and part of the forward ran twice",
    ),
    SpeedUp(
        what="Llama 3 70B, MXFP8 over BF16, 32 to 1,504 devices",
        source="pytorch.org blog of 2025, torchao 0.10 and torchtitan on Crusoe's B200",
        published=1.25,
        hardware="B200",
        work=_llama(256, model=_LLAMA_70B, devices=64),
        slow=Recipe(),
        fast=_MXFP8,
        why="1.22 to 1.28 with a first version of the kernels, as its authors say; communication is not told",
    ),
    SpeedUp(
        what="DeepSeek-V3 16B, NVFP4 with MXFP8 attention layers over BF16",
        source="pytorch/ao#4798",
        published=1.154,
        hardware="GB300",
        work=Workload(
            model=_DEEPSEEK_16B, vocab_size=102_400, seq_len=4096, tokens_per_step=8 * 4 * 4096, devices=8
        ),
        slow=Recipe(),
        fast=replace(_NVFP4, rules=(_ATTENTION_MXFP8,)),
        why="batch and devices are assumed; routing, sending tokens to experts and launches are left out",
    ),
    SpeedUp(
        what="linear layers of a 5B model, their GEMMs alone, FP8 over BF16",
        source="TransformerEngine, gemm_profiling.rst (commit 8f2e635)",
        published=31.968 / 16.785,
        hardware="H200",
        work=Workload(
            model=ModelConfig(architecture="gpt", width=_WIDTH, layers=1, heads=32, ffn=4 * _WIDTH),
            vocab_size=1,
            seq_len=512,
            tokens_per_step=_TOKENS,
        ),
        slow=Recipe(),
        fast=_FP8,
        parts=("fprop", "dgrad", "wgrad"),
    ),
    SpeedUp(
        what="backward pass of a Llama 2 70B block, MXFP4 over FP8 (estimated there)",
        source="Tseng et al., arXiv 2502.20586, abstract",
        published=1.3,
        hardware="B200",
        work=_LLAMA_70B_BLOCK,
        slow=_FP8,
        fast=PRESETS["tseng-fp8"].recipe,
        at_least=True,
        parts=BACKWARD,
    ),
    SpeedUp(
        what="backward pass of a Llama 2 70B block, MXFP4 over BF16 (estimated there)",
        source="Tseng et al., arXiv 2502.20586, abstract",
        published=1.7,
        hardware="B200",
        work=_LLAMA_70B_BLOCK,
        slow=Recipe(),
        fast=PRESETS["tseng"].recipe,
        at_least=True,
        parts=BACKWARD,
        why="a lower bound",
    ),
)
"""Speed-ups that no rate was chosen by. Of Megatron-Bridge (docs/performance-summary-archive.md, commit
067f987) those with the same parallelism on both sides; attention is assumed to be in bf16."""
