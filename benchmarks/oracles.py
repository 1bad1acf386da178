"""Our bits against the plain-torch functions of the sources themselves, run from checkouts of them.

    python benchmarks/oracles.py --fouroversix PATH --transformer-engine PATH --alto PATH --torchao PATH
        --microxcaling PATH --quartet PATH --quartet2 PATH

Each option is a checkout, at the versions of ``ablate/recipes/presets.json`` for the figures of the
documentation. Only the files with reference functions are imported, beside empty packages, so that nothing
is built; the Triton kernels of Quartet and Quartet II run in Triton's interpreter. Three bf16 tensors a case:
Gaussian, Gaussian with rows of very different size, and one full of ties. What differs is counted by cause:

    scale: blocks whose scale differs by its last place, from another order of operations in fp32
    choice: blocks for which four-or-six or IF4 chose otherwise
    tie: elements under equal scales whose scaled value lies within 1e-5 of a midpoint
    wraps: elements that we clip and the source does not: fouroversix rounds 7 and more to 8, whose code is −0
    other: elements under equal scales that differ for no such reason
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ablate.numerics import OperandPolicy, quantize
from ablate.numerics.formats import (
    E4M3,
    ELEMENTS,
    INT4,
    UE5M3,
    decode,
    e8m0_decode,
    rounded,
)
from ablate.numerics.quantiser import on_grid
from ablate.recipes import block_shape

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 512
NEAR = 1e-5


@dataclass(frozen=True, kw_only=True)
class Theirs:
    """What a source makes of x: elements [n, k] and block scales, or the dequantised values alone."""

    elements: Tensor | None = None
    scales: Tensor | None = None
    values: Tensor | None = None


def tensors() -> Iterator[Tensor]:
    """Yield the three tensors, bf16 [512, 512]."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SIZE, SIZE, generator=generator)
    yield x.to(torch.bfloat16)
    yield (x * 2.0 ** torch.linspace(-12, 12, SIZE)[:, None]).to(torch.bfloat16)
    ties = torch.randint(-48, 49, (SIZE, SIZE), generator=generator) / 8.0
    ties[:, ::16] = 6.0
    yield ties.to(torch.bfloat16)


def package(name: str, folder: Path | None = None, **contents: Any) -> None:
    """Put an empty package in place of one whose own start needs what is not here."""
    module = types.ModuleType(name)
    module.__path__ = [] if folder is None else [str(folder)]  # type: ignore[attr-defined]
    vars(module).update(contents)
    sys.modules[name] = module


def nibbles(packed: Tensor) -> Tensor:
    """Return 4-bit codes, the first in the low nibble."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)


def e2m1(packed: Tensor) -> Tensor:
    return decode(nibbles(packed), ELEMENTS["nvfp4"])


def expanded(scales: Tensor, shape: torch.Size) -> Tensor:
    """Repeat block scales to one an element."""
    return scales.repeat_interleave(shape[0] // scales.shape[0], 0).repeat_interleave(
        shape[1] // scales.shape[1], 1
    )


def ours(x: Tensor, policy: OperandPolicy) -> tuple[Tensor, Tensor]:
    """Return our elements and scales, expanded; IF4's whole numbers have a negative scale."""
    codes = quantize(x, policy)
    elements = decode(codes.codes, ELEMENTS[policy.format])
    scales = codes.scales
    if policy.format.startswith("mx"):
        scales = e8m0_decode(scales.to(torch.int32))
    elif scales.dtype == torch.uint8:
        scales = decode(scales, UE5M3 if policy.scale.endswith("ue5m3") else E4M3)
    scales = expanded(scales, codes.codes.shape)
    if policy.format == "if4":
        elements = torch.where(
            torch.signbit(scales), decode(codes.codes, INT4), elements
        )
    return elements, scales


def differences(x: Tensor, policy: OperandPolicy, theirs: Theirs) -> dict[str, int]:
    """Count what differs, by cause."""
    element = ELEMENTS[policy.format]
    elements, scales = ours(x, policy)
    if theirs.values is not None:
        their_elements = theirs.values.float() / (
            scales * quantize(x, policy).tensor_scale
        )
        their_elements = torch.where(scales == 0, elements, their_elements)
        on = (their_elements - rounded(their_elements, element)).abs() < 1e-3
        their_elements = rounded(their_elements, element)
        columns = block_shape(policy)[1]
        same = expanded(on.view(len(x), -1, columns).all(2), x.shape)
        last_place = ~same
    else:
        assert theirs.elements is not None
        assert theirs.scales is not None
        their_elements, their_scales = theirs.elements, expanded(theirs.scales, x.shape)
        # the elements of a zero block mean nothing
        zero = (scales == 0) | (their_scales == 0)
        same = (scales == their_scales) | (
            zero & (scales.abs() + their_scales.abs() < 2**-8)
        )
        ratio = torch.maximum(scales, their_scales) / torch.minimum(
            scales, their_scales
        )
        last_place = ~same & (ratio > 0) & (ratio < 1.2)
        their_elements = torch.where(zero, elements, their_elements)
    apart = same & (elements != their_elements)
    scaled = on_grid(x, policy, axis=1).scaled.abs()
    if policy.format == "if4":
        scaled = torch.where(torch.signbit(scales), scaled * 7 / 6, scaled)
    down, up = (
        rounded(scaled * (1 - NEAR), element),
        rounded(scaled * (1 + NEAR), element),
    )
    tie = apart & (down != up)
    wraps = apart & (scaled >= element.max + 1) & (their_elements == 0)
    size = block_shape(policy)[0] * block_shape(policy)[1]
    return {
        "scale": int(last_place.sum()) // size, "choice": int((~same & ~last_place).sum()) // size,
        "tie": int(tie.sum()), "wraps": int(wraps.sum()), "other": int((apart & ~tie & ~wraps).sum()),
    }  # fmt: skip


Case = tuple[str, OperandPolicy, Any]
"""A name, our policy, and the function from x to ``Theirs``."""
NVFP4 = OperandPolicy(format="nvfp4")
FIXED = {"hadamard": 16, "signs": "fixed", "rotated_bf16": True}


def fouroversix(path: Path) -> Iterator[Case]:
    """Run ``fouroversix.quantize.pytorch.reference.quantize``, nearest."""
    source = path / "src" / "fouroversix"
    for name in (
        "fouroversix",
        "fouroversix.quantize",
        "fouroversix.quantize.pytorch",
        "fouroversix.kernels",
    ):
        package(name, source.joinpath(*name.split(".")[1:]))
    reference = importlib.import_module("fouroversix.quantize.pytorch.reference")
    words = importlib.import_module("fouroversix.utils")
    rotation = importlib.import_module("fouroversix.quantize.utils").get_rht_matrix(
        device="cpu"
    )

    def run(fmt: str, rule: str, **options: Any) -> Any:
        def of(x: Tensor) -> Theirs:
            codes, scales, _ = reference.quantize(
                x, fp4_format=words.DataType(fmt), scale_rule=words.ScaleRule(rule),
                use_blackwell_scale_layout=False, **options,
            )  # fmt: skip
            scales = scales.view(x.shape[0], -1)
            signed, whole = scales.float(), nibbles(codes)
            flags = expanded(torch.signbit(signed), x.shape)
            whole = torch.where(whole > 7, whole.float() - 16, whole.float())
            values = (
                e2m1(codes)
                if fmt == "nvfp4"
                else torch.where(flags, whole, e2m1(codes))
            )
            return Theirs(elements=whole if fmt == "nvint4" else values, scales=signed)

        return of

    for rule, ours_is in (
        ("static_6", "two_level"),
        ("mse", "four_six"),
        ("mae", "four_six_mae"),
    ):
        yield rule, OperandPolicy(format="nvfp4", scale=ours_is), run("nvfp4", rule)
    tile = OperandPolicy(format="nvfp4", scale="four_six", block="16x16")
    yield "mse, 16×16", tile, run("nvfp4", "mse", block_scale_2d=True)
    turned = OperandPolicy(format="nvfp4", scale="four_six", **FIXED)
    yield "mse, rotated", turned, run("nvfp4", "mse", had=rotation)
    yield "NVINT4", OperandPolicy(format="nvint4"), run("nvint4", "static_6")
    yield "IF4", OperandPolicy(format="if4"), run("if4", "mse")


def transformer_engine(path: Path) -> Iterator[Case]:
    """Run ``NVFP4QuantizerRef`` and ``BlockwiseQuantizerReference``."""
    for name in (
        "transformer_engine",
        "transformer_engine.pytorch",
        "transformer_engine.pytorch.custom_recipes",
    ):
        package(name, path.joinpath(*name.split(".")))
    base = {"__init__": lambda *_, **__: None}
    package(
        "transformer_engine.pytorch.quantized_tensor",
        QuantizedTensorStorage=type("Storage", (), {}), Quantizer=type("Quantizer", (), base),
    )  # fmt: skip
    package("transformer_engine.pytorch.tensor")
    package("transformer_engine.pytorch.tensor.utils", is_custom=None)
    module = importlib.import_module(
        "transformer_engine.pytorch.custom_recipes.reference_nvfp4"
    )

    def run(rotated: bool = False, **options: Any) -> Any:
        def of(x: Tensor) -> Theirs:
            quantizer = module.NVFP4QuantizerRef(
                dtype=None, rowwise=True, columnwise=False, **options
            )
            quantizer.rowwise_usage, quantizer.columnwise_usage = True, False
            source = (
                module.NVFP4QuantizerRef(dtype=None, with_rht=True)._apply_rht(x)  # noqa: SLF001
                if rotated
                else x
            )
            packed, scales, *_ = quantizer._quantize(source)  # noqa: SLF001
            return Theirs(elements=e2m1(packed), scales=scales.float())

        return of

    yield "1×16", NVFP4, run()
    yield (
        "16×16",
        OperandPolicy(format="nvfp4", block="16x16"),
        run(quant_tile_shape=(16, 16)),
    )
    yield "rotated", OperandPolicy(format="nvfp4", **FIXED), run(rotated=True)
    yield (
        "a scale a row",
        OperandPolicy(format="nvfp4", scale="two_level_row"),
        run(row_scaled_nvfp4=True),
    )
    for error, largest in (("MAE", 256), ("MAE", 448), ("MSE", 256), ("MSE", 448)):
        words = [
            "four_six",
            *(["mae"] if error == "MAE" else []),
            *(["448"] if largest == 448 else []),
        ]
        options = {
            "nvfp4_use_4over6": True,
            "nvfp4_e4m3_max": largest,
            "nvfp4_4over6_err_mode": error,
        }
        yield (
            f"4over6 {error} {largest}",
            OperandPolicy(format="nvfp4", scale="_".join(words)),
            run(**options),
        )
    sys.path.insert(0, str(path / "tests" / "pytorch"))
    blockwise = importlib.import_module("references.blockwise_quantizer_reference")

    def fp8(tile: tuple[int, int], powers: bool) -> Any:
        def of(x: Tensor) -> Theirs:
            quantised = blockwise.BlockwiseQuantizerReference().quantize(
                x,
                torch.float8_e4m3fn,
                pow_2_scales=powers,
                quant_tile_shape=tile,
                munge_scale_shapes=False,
            )
            return Theirs(elements=quantised.data.float(), scales=quantised.scale)

        return of

    for rows in (1, 128):
        for powers in (True, False):
            scale = f"{rows}x128{'_pow2' if powers else ''}"
            yield (
                f"FP8 {scale}",
                OperandPolicy(format="fp8_e4m3", scale=scale),
                fp8((rows, 128), powers),
            )


def alto(path: Path) -> Iterator[Case]:
    """Run the references of ALTO's unit tests: NVFP4, AMD-FP4 and MXFP4."""
    sys.path.insert(0, str(path))
    for name in (
        "alto",
        "alto.kernels",
        "alto.kernels.fp4",
        "alto.kernels.fp4.nvfp4",
        "alto.kernels.fp4.mxfp4",
    ):
        package(name, path.joinpath(*name.split(".")))
    package("alto.kernels.fp4.fp4_common", path / "alto/kernels/fp4/fp4_common")
    for part in ("triton_fp4_ops", "ue5m3_ops"):
        module = importlib.import_module(f"alto.kernels.fp4.fp4_common.{part}")
        vars(sys.modules["alto.kernels.fp4.fp4_common"]).update(vars(module))

    def load(part: str) -> Any:
        name = f"alto_tests_{part}"
        spec = importlib.util.spec_from_file_location(
            name, path / "tests/unittest" / part / "utils.py"
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    nvfp4, mxfp4 = load("nvfp4"), load("mxfp4")

    def run(outer: bool, **options: Any) -> Any:
        def of(x: Tensor) -> Theirs:
            of_tensor = x.float().abs().max() / (114688 * 6) if outer else None
            packed, scales = nvfp4.convert_to_nvfp4_pytorch(
                x, scale_format="ue5m3", outer_scale=of_tensor, **options
            )
            return Theirs(elements=e2m1(packed), scales=scales.float())

        return of

    def mx(**options: Any) -> Any:
        def of(x: Tensor) -> Theirs:
            packed, scales = mxfp4.convert_to_mxfp4_pytorch(x.float(), **options)
            return Theirs(
                elements=e2m1(packed), scales=e8m0_decode(scales.to(torch.int32))
            )

        return of

    yield "AMD-FP4", OperandPolicy(format="nvfp4", scale="ue5m3"), run(outer=False)
    yield (
        "AMD-FP4, two levels",
        OperandPolicy(format="nvfp4", scale="two_level_ue5m3"),
        run(outer=True),
    )
    tile = OperandPolicy(format="nvfp4", scale="ue5m3", block="16x16")
    yield "AMD-FP4, 16×16", tile, run(outer=False, is_2d_block=True)
    yield "MXFP4", OperandPolicy(format="mxfp4", scale="even"), mx()
    yield (
        "MXFP4, 32×32",
        OperandPolicy(format="mxfp4", scale="even", block="32x32"),
        mx(is_2d_block=True),
    )


def torchao(path: Path) -> Iterator[Case]:
    """Run the plain-torch reference beside torchao's NVFP4 training kernels."""
    names = ["torchao", "prototype", "moe_training", "nvfp4_training"]
    for end in range(3, 5):
        package(".".join(names[:end]), path.joinpath(*names[:end]))
    sys.path.insert(0, str(path / "test/prototype/moe_training/nvfp4_training"))
    reference = importlib.import_module("nvfp4_reference")

    def run(block: str, rotated: bool = False) -> Any:
        def of(x: Tensor) -> Theirs:
            source = reference.reference_rht(x.t().contiguous()) if rotated else x
            quantised = reference.nvfp4_reference_quantize(
                source, source.float().abs().max(), block=block
            )
            return Theirs(
                elements=e2m1(quantised.codes), scales=quantised.scales.float()
            )

        return of

    yield "1×16", NVFP4, run("1x16")
    yield "16×16", OperandPolicy(format="nvfp4", block="16x16"), run("16x16")
    yield "rotated", OperandPolicy(format="nvfp4", **FIXED), run("1x16", rotated=True)


def microxcaling(path: Path) -> Iterator[Case]:
    """Run ``mx_ops._quantize_mx``, whose ``nearest`` Tseng's code uses."""
    sys.path.insert(0, str(path))
    package("mx", path / "mx")
    ops = importlib.import_module("mx.mx_ops")

    def run(rounding: str, fmt: str = "fp4_e2m1") -> Any:
        def of(x: Tensor) -> Theirs:
            quantised = ops._quantize_mx(  # noqa: SLF001
                x.float(), 8, elem_format=fmt, axes=[-1], block_size=32, round=rounding
            )
            return Theirs(values=quantised)

        return of

    yield (
        "MXFP4, nearest",
        OperandPolicy(format="mxfp4", rounding="nearest_away"),
        run("nearest"),
    )
    yield "MXFP4, even", OperandPolicy(format="mxfp4"), run("even")


def quartet(path: Path) -> Iterator[Case]:
    """Run Quartet's forward kernel, in Triton's interpreter."""
    kernels = _kernels(
        "quartet_mxfp4", path / "src/models/quantization/quantizers/mxfp4_triton.py"
    )
    matrix = _hadamard(32)

    def run(x: Tensor) -> Theirs:
        out = torch.empty(x.shape)
        kernels.mxfp4_forward_kernel.fn[(x.numel() // 2048,)](
            x.float(), matrix, out, torch.empty(x.shape, dtype=torch.bool), x.numel(), 32, 32,
            2.92247856 / 6.0, False, None, True, BLOCK_SIZE=2048,
        )  # fmt: skip
        return Theirs(values=out)

    policy = OperandPolicy(
        format="mxfp4", scale="quest", rounding="nearest_toward_zero", hadamard=32
    )
    yield "forward", policy, run


def quartet2(path: Path) -> Iterator[Case]:
    """Run Quartet II's forward kernel, in Triton's interpreter."""
    kernels = _kernels(
        "quartet2_nvfp4", path / "src/models/quantization/quantizers/nvfp4_triton.py"
    )

    def run(four_over_six: bool) -> Any:
        def of(x: Tensor) -> Theirs:
            out = torch.empty(x.shape)
            kernels.rtn_1x16s_fp4_kernel.fn[(x.numel() // 2048,)](
                x.float(),
                x.float().abs().max(),
                out,
                x.numel(),
                1.0,
                16,
                four_over_six,
                BLOCK_SIZE=2048,
            )
            return Theirs(values=out)

        return of

    yield (
        "two-level",
        OperandPolicy(format="nvfp4", rounding="nearest_away"),
        run(False),
    )
    four_six = OperandPolicy(format="nvfp4", scale="four_six", rounding="nearest_away")
    yield "four-or-six", four_six, run(True)


def _kernels(name: str, path: Path) -> Any:
    """Import a file of Triton kernels, for the interpreter with the device's cast to E4M3.

    Triton's own interpreter loses the carry of that cast: 127 becomes 64.
    """
    from triton import language
    from triton.runtime import interpreter

    usual = interpreter._convert_float  # noqa: SLF001

    def cast(data: Any, before: Any, after: Any, mode: Any) -> Any:
        if (before, after) != (language.float32, language.float8e4nv):
            return usual(data, before, after, mode)
        return (
            torch.from_numpy(data.copy())
            .to(torch.float8_e4m3fn)
            .view(torch.uint8)
            .numpy()
        )

    interpreter._convert_float = cast  # noqa: SLF001
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _hadamard(size: int) -> Tensor:
    from ablate.numerics import hadamard_matrix

    return hadamard_matrix(size).float()


SOURCES = {
    "fouroversix": fouroversix, "transformer-engine": transformer_engine, "alto": alto, "torchao": torchao,
    "microxcaling": microxcaling, "quartet": quartet, "quartet2": quartet2,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in SOURCES:
        parser.add_argument(f"--{name}", type=Path, metavar="PATH")
    given = {
        name: path
        for name, path in vars(parser.parse_args()).items()
        if path is not None
    }
    if not given:
        parser.error("name at least one checkout, such as --fouroversix PATH")
    os.environ["TRITON_INTERPRET"] = "1"
    print(
        f"{'source':19}{'case':22}{'values':>9}{'scale':>8}{'choice':>8}{'tie':>8}{'wraps':>8}{'other':>8}"
    )
    for name, path in given.items():
        source = name.replace("_", "-")
        for case, policy, of in SOURCES[source](path.resolve()):
            total = dict.fromkeys(("scale", "choice", "tie", "wraps", "other"), 0)
            values = 0
            for x in tensors():
                values += x.numel()
                for cause, count in differences(x, policy, of(x)).items():
                    total[cause] += count
            print(
                f"{source:19}{case:22}{values:9,}"
                + "".join(f"{count:8,}" for count in total.values())
            )


if __name__ == "__main__":
    main()
