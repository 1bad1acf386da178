"""Published peak rates of GPUs: arithmetic, dense, without sparsity, and memory; and how much they have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Dense peaks in TFLOP/s by format class (None: no such unit), memory in TB/s, and where they stand.

    ``capacity``: memory in GB (10⁹ bytes). NVIDIA's: the "GPU memory" of the datasheets named, as NIM's
    support matrix (docs.nvidia.com/nim) lists it; of B200 180, of which an HGX or DGX board has eight.
    AMD's 288 is as others cite it, and not checked against its datasheet.
    ``nvfp4``: whether its FP4 unit takes E4M3 scales for 16 elements; CDNA 4's takes E8M0 for 32 alone.
    """

    bf16: float
    fp8: float
    fp4: float | None
    memory: float
    capacity: float
    source: str
    nvfp4: bool = True


PEAKS: dict[str, Peaks] = {
    "H100": Peaks(
        bf16=989,
        fp8=1979,
        fp4=None,
        memory=3.35,
        capacity=80,
        source="NVIDIA H100 SXM datasheet, half of its sparse rates",
    ),
    "H200": Peaks(
        bf16=989,
        fp8=1979,
        fp4=None,
        memory=4.8,
        capacity=141,
        source="NVIDIA H200 SXM datasheet, half of its sparse rates",
    ),
    "B200": Peaks(
        bf16=2250,
        fp8=4500,
        fp4=9000,
        memory=8,
        capacity=180,
        source="NVIDIA HGX B200 datasheet, an eighth, dense; memory: B200",
    ),
    "B300": Peaks(
        bf16=2250,
        fp8=4500,
        fp4=13500,
        memory=8,
        capacity=288,
        source="NVIDIA HGX B300 datasheet, an eighth, dense",
    ),
    "MI350X": Peaks(
        bf16=2307,
        fp8=4614,
        fp4=9227,
        memory=8,
        capacity=288,
        source="AMD Instinct MI350X datasheet, dense",
        nvfp4=False,
    ),
    "MI355X": Peaks(
        bf16=2517,
        fp8=5033,
        fp4=10066,
        memory=8,
        capacity=288,
        source="AMD Instinct MI355X datasheet, dense",
        nvfp4=False,
    ),
}
"""By what stands in the device's name. A card's own clock and power limit may keep it below."""


def peaks_of(device_name: str) -> Peaks | None:
    """Return the peaks of a device by its name, None where it is not known."""
    return next((peaks for name, peaks in PEAKS.items() if name in device_name), None)


def peak_tflops(device_name: str, fmt: str) -> float | None:
    """Return the dense peak of a device for operands of a format, in TFLOP/s; None where it is not known."""
    peaks = peaks_of(device_name)
    if peaks is None:
        return None
    if fmt in ("mxfp4", "nvfp4"):
        return peaks.fp4
    return peaks.fp8 if fmt.startswith(("fp8", "mxfp8")) else peaks.bf16
