"""Compile the kernels ahead of time for an absent GPU, and check the result.

    ablate check backends sm_100   # every tile and variant for one architecture

Triton's wheel holds the compilers and disassemblers of NVIDIA and AMD, so this runs on any machine, but not
in a process with ``TRITON_INTERPRET=1``. Triton silently widens operands to bf16 if a tile does not suit the
hardware, and compiles a kernel that only traps if tensor memory is too small. Both count as problems here,
and so do spilled registers, shared memory above the device's limit, and arithmetic of the quantiser that has
other bits than the reference's.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ablate.backends.device import OLDEST_TO_WIDEN_NVFP4, release
from ablate.backends.testing.inputs import label, policies_of
from ablate.backends.triton.gemm import GROUP, gemm_kernel
from ablate.backends.triton.policies import (
    FORMATS,
    TILES,
    Tile,
    scale_constants,
    side_of,
    tile,
)
from ablate.backends.triton.quantise import WORDS, quantise_kernel, scale_kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.recipes import OperandPolicy

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163),
    "sm_90": (GPUTarget("cuda", 90, 32), 227),
    "sm_100": (GPUTarget("cuda", 100, 32), 227),
    "sm_103": (GPUTarget("cuda", 103, 32), 227),
    "sm_120": (GPUTarget("cuda", 120, 32), 99),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64),
    "gfx950": (GPUTarget("hip", "gfx950", 64), 160),
}
"""Triton's name of each target, and its shared memory limit of one program in KiB (CUDA programming guide:
compute capabilities; CDNA 3 and 4 ISA)."""
TENSOR_MEMORY_COLUMNS = 512
STACK_BYTES = {"gemm": 0, "quantise": 64, "scale": 0}
"""Allowed spills per thread: none in the GEMM's loop, few in a kernel that waits for memory."""

_FP4 = r"tcgen05\.mma\S*kind::mxf4(?:nvf4)?\.block_scale\S*"
_NATIVE = {
    ("cuda", "mxfp4"): _FP4
    + r"|mma\.sync\S*kind::mxf4nvf4\.block_scale\.scale_vec::2X\S*e2m1\S*",
    ("cuda", "nvfp4"): _FP4
    + r"|mma\.sync\S*kind::mxf4nvf4\.block_scale\.scale_vec::4X\S*e2m1\S*",
    (
        "cuda",
        "mxfp8",
    ): r"tcgen05\.mma\S*kind::mxf8f6f4\.block_scale\S*|mma\.sync\S*mxf8f6f4\.block_scale\S*",
    ("hip", "mxfp4"): r"v_mfma_scale_f32_\w+f8f6f4(?=[^\n]*cbsz:4[^\n]*blgp:4)",
    ("hip", "mxfp8"): r"v_mfma_scale_f32_\w+f8f6f4(?![^\n]*(?:cbsz|blgp):[1-9])",
}
_UPCAST = r"wgmma\.mma_async\S*bf16|mma\.sync\S*bf16\S*|tcgen05\.mma\S*kind::(?:f16|tf32)\S*|v_mfma_f32_\w+bf16\w*"


_BY_16 = ("K", "N", "rows", "columns", "stride_row")
"""Numbers that 16 divides."""
_OUT = {"codes": "*u8", "values": "*bf16", "amax": "*fp32"}
_VARIANTS = """\
                               | mxfp4 stochastic 0.75 H16 step         | codes
nvfp4                          | nvfp4 stochastic_8bit H16 fixed        | codes
mxfp4 stochastic 0.75 H16 step |                                        | codes
mxfp4 stochastic 0.75 H16 step | mxfp4 stochastic 0.75 H16 step         | codes
mxfp4 stochastic 0.75 H64 step | mxfp4 stochastic 0.75 H64 step         | codes
mxfp4                          | mxfp4                                  | codes
mxfp4 H16                      | mxfp4 H16                              | codes
mxfp8                          | mxfp8                                  | codes
fp8_e4m3                       | fp8_e4m3                               | codes
mxfp4 32x32                    | mxfp4 32x32                            | codes
nvfp4 four_six 16x16           | nvfp4 four_six stochastic              | codes
mxfp4 quest H32 mask           | mxfp4 stochastic 0.75 H16 step permute | codes
nvfp4 ms_eden H32 step         | nvfp4 ms_eden H32 step                 | codes
mxfp4 nearest_away             | mxfp4 stochastic_rocm                  | codes
mxfp4 stochastic 0.75 H16 step |                                        | values
                               | mxfp8                                  | values
mxfp4 quest H32 mask           |                                        | values
                               | nvfp4 four_six                         | values
                               | nvfp4 ms_eden_unscaled H128 step       | values
nvfp4 H16 fixed                | fp8_e4m3 H32 step                      | amax
"""


VARIANTS: list[tuple[OperandPolicy | None, OperandPolicy | None, str]] = []
"""The quantiser's variants that are compiled: along rows, along columns, and what is written."""
for _line in _VARIANTS.splitlines():
    *_sides, _output = _line.split("|")
    _rows, _columns = (next(iter(policies_of(side)), None) for side in _sides)
    VARIANTS.append((_rows, _columns, _output.strip()))
SCALES = policies_of(
    "fp8_e4m3\nnvfp4 stochastic 16/17 H16 step\nnvfp4 ms_eden H16 step"
)
"""Policies whose tensor's scale is compiled."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One kernel compiled for one target, with its native instructions and its problems."""

    kernel: str
    target: str
    variant: str
    instructions: dict[str, int] = field(default_factory=dict)
    shared_bytes: int = 0
    problems: tuple[str, ...] = ()


def compile_gemm(target: str, fmt: str, tile: Tile, *, even: bool = False) -> Compiled:
    """Compile the block-scaled GEMM for one target, format and tile; a compiler's error is a problem."""
    constants = FORMATS[fmt] | {
        "BM": tile.bm,
        "BN": tile.bn,
        "BK": tile.bk,
        "GROUP": GROUP,
        "EVEN": even,
    }
    types = dict.fromkeys(("a", "a_scales", "b", "b_scales"), "*u8")
    types |= {"c": "*bf16", "alpha": "fp32"} | dict.fromkeys(("M", "N", "K"), "i32")
    if fmt == "nvfp4":
        types |= dict.fromkeys(("a_descale", "b_descale"), "*fp32")
    variant = f"{fmt} {tile.bm}×{tile.bn}×{tile.bk}, {tile.warps} warps{'' if even else ', masked'}"
    try:
        kernel = _compile(
            gemm_kernel, target, types, constants, tile.warps, tile.stages
        )
    except Exception as error:
        # compilers raise many types; each means that this tile cannot be used
        problems = (f"does not compile: {error}",)
        return Compiled(
            kernel="gemm", target=target, variant=variant, problems=problems
        )
    native = _NATIVE.get((TARGETS[target][0].backend, fmt))
    return _read(kernel, "gemm", target, variant, native)


def compile_quantiser(
    target: str,
    rows: OperandPolicy | None,
    columns: OperandPolicy | None,
    output: str = "codes",
) -> Compiled:
    """Compile the quantise kernel that writes codes or values along rows, columns or both."""
    tile_rows, tile_columns, warps = tile(rows, columns, target)
    constants: dict[str, Any] = {
        "TILE_ROWS": tile_rows,
        "TILE_COLUMNS": tile_columns,
        "WIDE": False,
        "stride_column": 1,
    }
    types: dict[str, Any] = {"x": "*bf16"}
    types |= dict.fromkeys(("rows", "columns", "stride_row", "step", "call"), "i32")
    if output == "values":  # as in a CUDA graph
        types["position"] = "*i64"
    variants = []
    for axis, policy in (("rows", rows), ("columns", columns)):
        prefix = axis[0]
        constants[prefix.upper()] = side_of(policy, output)
        types |= {f"{prefix}_{word}": "i32" for word in WORDS}
        if policy is None:
            continue
        variants.append(f"{axis} {label(policy)}")
        types[f"{prefix}_out"] = _OUT[output]
        if policy.format in FORMATS and output == "codes":
            types[f"{prefix}_scales"] = "*u8"
        if policy.mask:
            types[f"{prefix}_mask"] = "*i1"
        if policy.has_tensor_scale:
            types[f"{prefix}_tensor"] = "*fp32"
    kernel = _compile(quantise_kernel, target, types, constants, warps, 3)
    variant = " + ".join(variants)
    if output != "codes":
        variant += f", {output}"
    return _read(kernel, "quantise", target, variant, None)


def compile_scale(target: str, policy: OperandPolicy) -> Compiled:
    """Compile the kernel that computes a tensor's scale: from its values, or from parts after a rotation."""
    parts = "*fp32" if policy.hadamard else "*bf16"
    types = {"parts": parts, "number": "i32", "amax": "fp32", "tensor": "*fp32"}
    kernel = _compile(scale_kernel, target, types, scale_constants(policy), 4, 3)
    return _read(kernel, "scale", target, label(policy), None)


def _compile(
    function: Any,
    target: str,
    types: dict[str, Any],
    constants: dict[str, Any],
    warps: int,
    stages: int,
) -> Any:
    """Compile a kernel; an argument without type and constant is None in the kernel."""
    constants = dict.fromkeys(set(function.arg_names) - set(types)) | constants
    signature = {}
    values = {}
    attributes = {}
    for place, name in enumerate(function.arg_names):
        signature[name] = types.get(name, "constexpr")
        if name in constants:
            values[place,] = constants[name]
        if signature[name].startswith("*") or name in _BY_16:
            attributes[place,] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, values, attributes)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    return triton.compile(source, target=TARGETS[target][0], options=options)


def _read(
    kernel: Any, name: str, target: str, variant: str, native: str | None
) -> Compiled:
    gpu, kib = TARGETS[target]
    is_cuda = gpu.backend == "cuda"
    text = kernel.asm["ptx" if is_cuda else "amdgcn"]
    spilled = _stack_bytes(kernel) if is_cuda else _spilled_registers(text)
    instructions = Counter(re.findall(native, text)) if native else Counter()
    shared = int(kernel.metadata.shared)
    columns = int(getattr(kernel.metadata, "tmem_size", 0) or 0)
    problems = []
    if spilled is None:
        problems.append("its resources could not be read")
    if name == "gemm":
        if not instructions:
            problems.append("no native instruction")
        if upcasts := sorted(set(re.findall(_UPCAST, text))):
            problems.append(f"widened: {', '.join(upcasts)}")
    else:
        problems += inexact(text, gpu.backend)
    if re.search(r"^\s*(?:@\S+\s+)?trap;|\bs_trap\b", text, re.MULTILINE):
        problems.append("traps")
    if shared > kib * 1024:
        problems.append(f"{shared / 1024:.0f} KiB of shared memory, over {kib}")
    if columns > TENSOR_MEMORY_COLUMNS:
        problems.append(
            f"{columns} columns of tensor memory, over {TENSOR_MEMORY_COLUMNS}"
        )
    if (spilled or 0) > STACK_BYTES[name]:
        problems.append(
            f"{spilled} {'bytes of stack' if is_cuda else 'registers'} spilled"
        )
    return Compiled(
        kernel=name,
        target=target,
        variant=variant,
        instructions=dict(instructions),
        shared_bytes=shared,
        problems=tuple(problems),
    )


def _stack_bytes(kernel: Any) -> int | None:
    """Read the bytes of stack per thread by NVIDIA's tool in Triton's wheel; None if it fails."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(program), "--dump-resource-usage", file.name]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode or not result.stdout:
        return None
    return sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", result.stdout)))


def _spilled_registers(text: str) -> int:
    return sum(map(int, re.findall(r"\.(?:vgpr|sgpr)_spill_count:\s*(\d+)", text)))


def inexact(text: str, backend: str) -> list[str]:
    """List what changes bits in PTX or AMD's machine code: roundings left out, or not to nearest.

    A ceiling may flush subnormals (``cvt.rpi``): it is of parts of a step, where none counts (``rounded``).
    AMD's exact division takes five fused multiply-adds and ends with ``v_div_fixup``; its exact square root
    takes two. One reciprocal belongs to the division of whole numbers that places the tile.
    """
    if backend == "cuda":
        flushing = r"(?<![\w.])(?!cvt\.rpi\.)\w+\.(?:\S+\.)?ftz\S*"
        pattern = (
            rf"\b(?:fma|mad)\.\S*f32|\b(?:div|sqrt|rcp)\.(?:full|approx)\S*|{flushing}"
        )
        return sorted(set(re.findall(pattern, text)))
    names = Counter(
        re.findall(r"\bv_(?:pk_)?(fma|mad|mac|div_fixup|sqrt|rcp)\w*_f32", text)
    )
    fused = names["fma"] + names["mad"] + names["mac"]
    exact = 5 * names["div_fixup"] + 2 * names["sqrt"]
    problems = []
    if fused != exact:
        problems.append(
            f"{fused} fused multiply-adds where exact operations take {exact}"
        )
    if names["rcp"] > names["div_fixup"] + 1:
        problems.append(
            f"{names['rcp']} reciprocals for {names['div_fixup']} exact divisions"
        )
    return problems


def every_kernel(target: str) -> Iterator[Compiled]:
    """Compile every tile of the GEMM, with and without masks, and the quantiser's variants for one target."""
    for (arch, fmt), tiles in TILES.items():
        if arch != target:
            continue
        is_old = release(triton.__version__) < OLDEST_TO_WIDEN_NVFP4
        if (target, fmt) == ("sm_90", "nvfp4") and is_old:
            continue
        for size in tiles:
            for even in (True, False):
                yield compile_gemm(target, fmt, size, even=even)
    for rows, columns, output in VARIANTS:
        yield compile_quantiser(target, rows, columns, output)
    for policy in SCALES:
        yield compile_scale(target, policy)
