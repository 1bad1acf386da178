"""The modelled speed beside public measurements: what it is calibrated on, and what it has not seen.

    python benchmarks/speed_model.py            # the tables of docs/planning.md
    python benchmarks/speed_model.py LOGS       # and what the logs in LOGS/SUBMITTER/SYSTEM/ say themselves

``LOGS``: a folder of MLPerf logs of Llama 3.1 8B (result_*.txt), of some or all of the calibrated systems.
"""

from __future__ import annotations

import argparse
import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from ablate.modelled.speed import (
    BACKWARD,
    LLAMA_8B,
    TokenTime,
    Workload,
    seconds_range,
    speed_up,
    token_time,
)
from ablate.recipes import (
    PRESETS,
    GemmPolicy,
    LayerRecipe,
    LayerRule,
    OperandPolicy,
    Recipe,
)
from ablate.reports.read.mllog import read_mllog
from ablate.run.config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ablate.modelled.speed import ModelledFigure

_TOKENS, _WIDTH = 15_872, 4096
_OUTPUTS = 12 * _WIDTH  # of a block's layers if each had _WIDTH inputs: 3 + 1 + 4 + 4
_BLOCK_FLOPS = 6.0 * _TOKENS * _WIDTH * _OUTPUTS
_X, _W, _DY = _TOKENS * 7 * _WIDTH, _WIDTH * _OUTPUTS, _TOKENS * 9 * _WIDTH
_CASTS = 2.0 * (_X + _W + _DY)  # there each GEMM quantises both of its operands anew


def _of_arithmetic(ms: float, peak: float) -> float:
    return _BLOCK_FLOPS / (ms / 1e3) / (peak * 1e12)


def _of_memory(ms: float, ms_without: float, bytes_each: float) -> float:
    return _CASTS * bytes_each / ((ms - ms_without) / 1e3) / 8e12


KERNELS: tuple[tuple[str, str, float], ...] = (
    ("GEMMs in BF16", "gemm16", _of_arithmetic(13.102, 2250)),
    ("GEMMs in FP8", "gemm8", _of_arithmetic(6.812, 4500)),
    ("GEMMs in MXFP8", "gemm8", _of_arithmetic(7.161, 4500)),
    ("GEMMs in NVFP4", "gemm4", _of_arithmetic(3.764, 13_500)),
    (
        "quantising to FP8, current scales",
        "memory",
        _of_memory(9.147, 6.812, 2 * 2 + 1),
    ),
    ("quantising to FP8, delayed scales", "memory", _of_memory(7.802, 6.812, 2 + 1)),
    ("quantising to MXFP8", "memory", _of_memory(8.984, 7.161, 2 + 1 + 1 / 32)),
    ("quantising to NVFP4", "memory", _of_memory(6.453, 3.764, 2 * 2 + 0.5 + 1 / 16)),
)
"""(what, rate, share of B300's peak), from milliseconds of all three GEMMs of one block's linear layers
(width 4,096, feed-forward 16,384, 15,872 tokens), with operands quantised beforehand and without. Source:
TransformerEngine, docs/examples/gemm_profiling/gemm_profiling.rst, commit 8f2e635."""


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
    parts: tuple[str, ...] = ()
    why: str = ""

    @property
    def modelled(self) -> ModelledFigure:
        """The modelled speed-up."""
        slow, fast = (
            token_time(self.work, one, self.hardware) for one in (self.slow, self.fast)
        )
        return speed_up(slow.by_kernel(*self.parts), fast.by_kernel(*self.parts))

    @property
    def deviation(self) -> float:
        """Modelled over published, minus one."""
        return self.modelled.estimate / self.published - 1


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
        time = token_time(self.work, self.recipe, self.hardware)
        assert time is not None  # measured there, so it has every unit
        return time

    @property
    def deviation(self) -> float:
        """Modelled over measured tokens per second, minus one."""
        return 1 / self.time.total / self.tokens_per_sec - 1


FP8 = PRESETS["te-hybrid-fp8"].recipe
NVFP4 = replace(PRESETS["nvidia-nvfp4"].recipe, rules=())  # here no block is in bf16
LOW_POWER = (
    "its power limit, 1,000 W where MI355X has 1,400 W, stands in no published peak"
)


def _mlperf(
    hardware: str,
    logs: str,
    recipe: Recipe,
    batch: int,
    tokens_per_sec: float,
    why: str = "",
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


def kernel_spread() -> float:
    """Compute ``speed.KERNEL_SPREAD``; two rates, attention's, were chosen by the calibrated steps."""
    squares = []
    for step in CALIBRATION:
        parts = step.time.by_kernel().values()
        shares = sum((part / step.time.total) ** 2 for part in parts)
        squares.append(math.log1p(step.deviation) ** 2 / shares)
    return math.sqrt(sum(squares) / (len(squares) - 2))


_MXFP8_GEMM = GemmPolicy(
    left=OperandPolicy(format="mxfp8"), right=OperandPolicy(format="mxfp8")
)
_MXFP8 = Recipe(fprop=_MXFP8_GEMM, dgrad=_MXFP8_GEMM, wgrad=_MXFP8_GEMM)
_MXFP4 = PRESETS["amd-fdw-dht16"].recipe
_NAMES = {FP8: "FP8", _MXFP8: "MXFP8", NVFP4: "NVFP4"}
_LLAMA_70B = ModelConfig(
    width=8192, layers=80, heads=64, kv_heads=8, ffn=28_672, tied_head=False
)
_LLAMA_70B_BLOCK = Workload(
    model=replace(_LLAMA_70B, layers=1),
    vocab_size=1,
    seq_len=4096,
    tokens_per_step=4 * 4096,
)
"""One decoder block of Llama 2 70B with a negligible head: the shapes of the estimate by Tseng et al."""
_LLAMA_405B = ModelConfig(
    width=16_384, layers=126, heads=128, kv_heads=8, ffn=53_248, tied_head=False
)
_DEEPSEEK_16B = ModelConfig(
    width=2048,
    layers=27,
    heads=16,
    ffn=1408,
    experts=66,
    experts_per_token=8,
    tied_head=False,
)


def _llama(
    batch: int, *, model: ModelConfig | None = None, devices: int = 8
) -> Workload:
    """Return Llama 3 with a global batch of so many sequences of 8,192 tokens."""
    return replace(
        LLAMA_8B,
        model=model or LLAMA_8B.model,
        tokens_per_step=batch * 8192,
        devices=devices,
    )


def _nemo(
    hardware: str, recipe: Recipe, tokens_per_sec: float, why: str = ""
) -> TimedStep:
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
    _primus("MI350X", 30_117, LOW_POWER),
    _nemo("B200", FP8, 30_624),
    _nemo("B200", _MXFP8, 29_521),
    _nemo("GB200", FP8, 31_508),
    _nemo("GB200", _MXFP8, 29_789, _SAME_PEAKS),
    _nemo("GB300", FP8, 37_556, _SAME_PEAKS),
    _nemo("GB300", _MXFP8, 36_108),
    _nemo("H100", FP8, 14_451, "the shares of peaks are those of later devices"),
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
    hardware: str,
    size: str,
    fast: Recipe,
    slow: Recipe,
    rates: tuple[float, float],
    split: str,
) -> SpeedUp:
    model, batch, devices = {
        "70B": (_LLAMA_70B, 256, 64),
        "405B": (_LLAMA_405B, 1536, 256),
    }[size]
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
        slow=FP8,
        fast=_MXFP4,
    ),
    _bridge("GB300", "70B", NVFP4, _MXFP8, (7296, 4864), "tensor 1, pipeline 4"),
    _bridge("GB200", "70B", NVFP4, _MXFP8, (4864, 3712), "tensor 2, pipeline 4"),
    _bridge("GB300", "405B", NVFP4, FP8, (1413, 1048), "tensor 4, pipeline 8"),
    _bridge("GB200", "405B", NVFP4, _MXFP8, (1166, 783), "tensor 4, pipeline 16"),
    SpeedUp(
        what="Llama 3 8B, FP8 over BF16",
        source=_TORCHAO,
        published=1.254,
        hardware="B200",
        work=_llama(8),
        slow=Recipe(),
        fast=FP8,
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
            model=_DEEPSEEK_16B,
            vocab_size=102_400,
            seq_len=4096,
            tokens_per_step=8 * 4 * 4096,
            devices=8,
        ),
        slow=Recipe(),
        fast=replace(NVFP4, rules=(_ATTENTION_MXFP8,)),
        why="batch and devices are assumed; routing, sending tokens to experts and launches are left out",
    ),
    SpeedUp(
        what="linear layers of a 5B model, their GEMMs alone, FP8 over BF16",
        source="TransformerEngine, gemm_profiling.rst (commit 8f2e635)",
        published=31.968 / 16.785,
        hardware="H200",
        work=Workload(
            model=ModelConfig(
                architecture="gpt", width=_WIDTH, layers=1, heads=32, ffn=4 * _WIDTH
            ),
            vocab_size=1,
            seq_len=512,
            tokens_per_step=_TOKENS,
        ),
        slow=Recipe(),
        fast=FP8,
        parts=("fprop", "dgrad", "wgrad"),
    ),
    SpeedUp(
        what="backward pass of a Llama 2 70B block, MXFP4 over FP8 (estimated there)",
        source="Tseng et al., arXiv 2502.20586, abstract",
        published=1.3,
        hardware="B200",
        work=_LLAMA_70B_BLOCK,
        slow=FP8,
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


def step_rows(steps: Sequence[TimedStep]) -> Iterator[str]:
    """Yield a row for each step: tokens per second of a device, measured and modelled."""
    for step in steps:
        seconds = seconds_range(step.time)
        ends = f"{1 / seconds.estimate:,.0f} [{1 / seconds.high:,.0f}, {1 / seconds.low:,.0f}]"
        what = f"{step.what}, on {step.hardware}"
        cells = (
            what,
            step.source,
            f"{step.tokens_per_sec:,.0f}",
            ends,
            _percent(step.deviation),
            step.why,
        )
        yield _row(cells)


def pair_rows(steps: Sequence[TimedStep]) -> Iterator[str]:
    """Yield a row for each hardware with two calibrated steps: how much faster NVFP4 is than FP8."""
    for slow, fast in itertools.pairwise(steps):
        if slow.hardware == fast.hardware:
            measured = fast.tokens_per_sec / slow.tokens_per_sec
            modelled = speed_up(slow.time.by_kernel(), fast.time.by_kernel())
            what = f"{fast.what} over FP8, on {fast.hardware}"
            ends = f"{modelled.estimate:.2f}× [{modelled.low:.2f}, {modelled.high:.2f}]"
            off = _percent(modelled.estimate / measured - 1)
            yield _row((what, "the steps above", f"{measured:.2f}×", ends, off, ""))


def speed_up_rows() -> Iterator[str]:
    """Yield a row for each published speed-up."""
    for pair in SPEED_UPS:
        modelled = pair.modelled
        cells = (
            *(f"{pair.what}, on {pair.hardware}", pair.source),
            f"{'> ' if pair.at_least else ''}{pair.published:.2f}×",
            f"{modelled.estimate:.2f}× [{modelled.low:.2f}, {modelled.high:.2f}]",
            *(_percent(pair.deviation), pair.why),
        )
        yield _row(cells)


def logged(folder: Path) -> float:
    """Return tokens per second of one of eight devices: the median of the logs' medians."""
    runs = (read_mllog(path, []) for path in sorted(folder.glob("result_*.txt")))
    return median(
        median(rate for _, rate in run.throughput) / 8
        for run in runs
        if run is not None
    )


HEAD = "| what | source | measured | modelled | deviation | why it is so far off |\n|---|---|---|---|---|---|"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("logs", nargs="?", type=Path, help="a folder of MLPerf logs")
    args = parser.parse_args()
    print("Shares of B300's peaks that kernels reach:\n")
    print("| kernel | rate | share |\n|---|---|---|")
    for what, rate, share in KERNELS:
        print(_row((what, rate, f"{share:.2f}")))
    print(
        f"\nSpread of a kind of kernel: {kernel_spread():.3f}. Tokens/s of a device, calibrated:\n"
    )
    print(HEAD)
    print(*step_rows(CALIBRATION), *pair_rows(CALIBRATION), sep="\n")
    print(f"\nHeld out:\n\n{HEAD}")
    print(*step_rows(HELD_OUT), *speed_up_rows(), sep="\n")
    if args.logs:
        print("\nLogs: as the table has it, and as read now:\n")
        for step in CALIBRATION:
            folder = args.logs / (step.logs or "")
            logged_rate = (
                f"{logged(folder):,.0f}" if folder.is_dir() else "no such folder"
            )
            print(_row((step.logs or "", f"{step.tokens_per_sec:,.0f}", logged_rate)))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _percent(value: float) -> str:
    return f"{value:+.1%}".replace("%", " %").replace("-", "−")


if __name__ == "__main__":
    main()
