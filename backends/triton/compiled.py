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
from ablate.backends.triton.policies import FORMATS, TILES, Tile, scale_constants, side_of, tile
from ablate.backends.triton.quantise import WORDS, quantise_kernel, scale_kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.recipes import OperandPolicy

TARGETS = {
    **{f"sm_{number}": (GPUTarget("cuda", number, 32), kib) for number, kib in (
        (80, 163), (90, 227), (100, 227), (103, 227), (120, 99)
    )},
    **{name: (GPUTarget("hip", name, 64), kib) for name, kib in (("gfx942", 64), ("gfx950", 160))},
}  # fmt: skip
"""Triton's name of each target, and its shared memory limit of one program in KiB (CUDA programming guide:
compute capabilities; CDNA 3 and 4 ISA)."""
TENSOR_MEMORY_COLUMNS = 512
STACK_BYTES = {"gemm": 0, "quantise": 64, "scale": 0}
"""Allowed spills per thread: none in the GEMM's loop, few in a kernel that waits for memory."""

_FP4 = r"tcgen05\.mma\S*kind::mxf4(?:nvf4)?\.block_scale\S*"
_NATIVE = {
    ("cuda", "mxfp4"): _FP4 + r"|mma\.sync\S*kind::mxf4nvf4\.block_scale\.scale_vec::2X\S*e2m1\S*",
    ("cuda", "nvfp4"): _FP4 + r"|mma\.sync\S*kind::mxf4nvf4\.block_scale\.scale_vec::4X\S*e2m1\S*",
    ("cuda", "mxfp8"): r"tcgen05\.mma\S*kind::mxf8f6f4\.block_scale\S*|mma\.sync\S*mxf8f6f4\.block_scale\S*",
    ("hip", "mxfp4"): r"v_mfma_scale_f32_\w+f8f6f4(?=[^\n]*cbsz:4[^\n]*blgp:4)",
    ("hip", "mxfp8"): r"v_mfma_scale_f32_\w+f8f6f4(?![^\n]*(?:cbsz|blgp):[1-9])",
}
_UPCAST = (
    r"wgmma\.mma_async\S*bf16|mma\.sync\S*bf16\S*|tcgen05\.mma\S*kind::(?:f16|tf32)\S*|v_mfma_f32_\w+bf16\w*"
)


_OUT = {"codes": "*u8", "values": "*bf16", "amax": "*fp32"}
VARIANTS = [
    (
        policies_of(rows)[0] if rows.strip() else None,
        policies_of(down)[0] if down.strip() else None,
        out.strip(),
    )
    for rows, down, out in (
        line.split("|")
        for line in """\
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
""".splitlines()
    )
]
"""The quantiser's variants that are compiled: along rows, along columns, and what is written."""
SCALES = policies_of("fp8_e4m3\nnvfp4 stochastic 16/17 H16 step\nnvfp4 ms_eden H16 step")
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
    constants = FORMATS[fmt] | {"BM": tile.bm, "BN": tile.bn, "BK": tile.bk, "GROUP": GROUP, "EVEN": even}
    types = dict.fromkeys(("a", "a_scales", "b", "b_scales"), "*u8")
    types |= {"c": "*bf16", "alpha": "fp32"} | dict.fromkeys(("M", "N", "K"), "i32")
    if fmt == "nvfp4":
        types |= dict.fromkeys(("a_descale", "b_descale"), "*fp32")
    variant = f"{fmt} {tile.bm}×{tile.bn}×{tile.bk}, {tile.warps} warps{'' if even else ', masked'}"
    try:
        kernel = _compile(gemm_kernel, target, types, constants, tile.warps, tile.stages)
    except Exception as error:  # compilers raise many types; each means that this tile cannot be used
        problems = (f"does not compile: {error}",)
        return Compiled(kernel="gemm", target=target, variant=variant, problems=problems)
    return _read(kernel, "gemm", target, variant, _NATIVE.get((TARGETS[target][0].backend, fmt)))


def compile_quantiser(
    target: str, rows: OperandPolicy | None, columns: OperandPolicy | None, output: str = "codes"
) -> Compiled:
    """Compile the quantise kernel that writes codes or values along rows, columns or both."""
    tile_rows, tile_columns, warps = tile(rows, columns, target)
    constants: dict[str, Any] = {"TILE_ROWS": tile_rows, "TILE_COLUMNS": tile_columns, "WIDE": False}
    constants["stride_column"] = 1
    types: dict[str, Any] = {"x": "*bf16"}
    types |= dict.fromkeys(("rows", "columns", "stride_row", "step", "call"), "i32")
    codes = output == "codes"
    if output == "values":  # as in a CUDA graph
        types["position"] = "*i64"
    for prefix, policy in (("r", rows), ("c", columns)):
        constants[prefix.upper()] = side_of(policy, output)
        types |= {f"{prefix}_{word}": "i32" for word in WORDS}
        if policy:
            given = {
                "out": _OUT[output], "scales": policy.format in FORMATS and codes and "*u8",
                "mask": policy.mask and "*i1", "tensor": policy.has_tensor_scale and "*fp32",
            }  # fmt: skip
            types |= {f"{prefix}_{name}": kind for name, kind in given.items() if kind}
    kernel = _compile(quantise_kernel, target, types, constants, warps, 3)
    sides = [f"{axis} {label(policy)}" for axis, policy in (("rows", rows), ("columns", columns)) if policy]
    variant = " + ".join(sides) + ("" if codes else f", {output}")
    return _read(kernel, "quantise", target, variant, None)


def compile_scale(target: str, policy: OperandPolicy) -> Compiled:
    """Compile the kernel that computes a tensor's scale: from its values, or from parts after a rotation."""
    parts = "*fp32" if policy.hadamard else "*bf16"
    types = {"parts": parts, "number": "i32", "amax": "fp32", "tensor": "*fp32"}
    kernel = _compile(scale_kernel, target, types, scale_constants(policy), 4, 3)
    return _read(kernel, "scale", target, label(policy), None)


def _compile(
    function: Any, target: str, types: dict[str, Any], constants: dict[str, Any], warps: int, stages: int
) -> Any:
    """Compile a kernel; an argument without type and constant is None in the kernel."""
    names = function.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    constants = dict.fromkeys(set(names) - set(types)) | constants
    aligned = {name for name in names if signature[name].startswith("*")} | {
        "K",
        "N",
        "rows",
        "columns",
        "stride_row",
    }
    source = ASTSource(
        function,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in aligned},
    )
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    return triton.compile(source, target=TARGETS[target][0], options=options)


def _read(kernel: Any, name: str, target: str, variant: str, native: str | None) -> Compiled:
    (gpu, kib), shared = TARGETS[target], int(kernel.metadata.shared)
    cuda = gpu.backend == "cuda"
    text = kernel.asm["ptx"] if cuda else kernel.asm["amdgcn"]
    usage, size = text, r"\.(?:vgpr|sgpr)_spill_count:\s*(\d+)"
    if cuda:  # bytes of stack per thread, by NVIDIA's tool in Triton's wheel
        program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            command = [str(program), "--dump-resource-usage", file.name]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        usage = done.stdout if done.returncode == 0 else ""
        size = r"(?:STACK|LOCAL):(\d+)"
    spilled = sum(int(number) for number in re.findall(size, usage))
    instructions = Counter(re.findall(native, text)) if native else Counter()
    columns = int(getattr(kernel.metadata, "tmem_size", 0) or 0)
    problems = [] if usage else ["its resources could not be read"]
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
        problems.append(f"{columns} columns of tensor memory, over {TENSOR_MEMORY_COLUMNS}")
    if spilled > STACK_BYTES[name]:
        problems.append(f"{spilled} {'bytes of stack' if cuda else 'registers'} spilled")
    return Compiled(
        kernel=name, target=target, variant=variant, instructions=dict(instructions),
        shared_bytes=shared, problems=tuple(problems),
    )  # fmt: skip


def inexact(text: str, backend: str) -> list[str]:
    """List what changes bits in PTX or AMD's machine code: roundings left out, or not to nearest.

    A ceiling may flush subnormals (``cvt.rpi``): it is of parts of a step, where none counts (``rounded``).
    AMD's exact division takes five fused multiply-adds and ends with ``v_div_fixup``; its exact square root
    takes two. One reciprocal belongs to the division of whole numbers that places the tile.
    """
    if backend == "cuda":
        flushing = r"(?<![\w.])(?!cvt\.rpi\.)\w+\.(?:\S+\.)?ftz\S*"
        pattern = rf"\b(?:fma|mad)\.\S*f32|\b(?:div|sqrt|rcp)\.(?:full|approx)\S*|{flushing}"
        return sorted(set(re.findall(pattern, text)))
    names = Counter(re.findall(r"\bv_(?:pk_)?(fma|mad|mac|div_fixup|sqrt|rcp)\w*_f32", text))
    fused = names["fma"] + names["mad"] + names["mac"]
    exact = 5 * names["div_fixup"] + 2 * names["sqrt"]
    problems = [] if fused == exact else [f"{fused} fused multiply-adds where exact operations take {exact}"]
    if names["rcp"] > names["div_fixup"] + 1:
        problems.append(f"{names['rcp']} reciprocals for {names['div_fixup']} exact divisions")
    return problems


def every_kernel(target: str) -> Iterator[Compiled]:
    """Compile every tile of the GEMM, with and without masks, and the quantiser's variants for one target."""
    for (arch, fmt), tiles in TILES.items():
        widens = (target, fmt) != ("sm_90", "nvfp4") or release(triton.__version__) >= OLDEST_TO_WIDEN_NVFP4
        if arch == target and widens:
            for tile in tiles:
                for even in (True, False):
                    yield compile_gemm(target, fmt, tile, even=even)
    for rows, columns, output in VARIANTS:
        yield compile_quantiser(target, rows, columns, output)
    for policy in SCALES:
        yield compile_scale(target, policy)
