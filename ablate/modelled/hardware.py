"""Published peak rates of GPUs (dense arithmetic without sparsity, and memory), and memory capacity."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)  # positional: a row of the table below
class Peaks:
    """Dense peaks in TFLOP/s by format class (None: no such unit), memory in TB/s, and their source.

    ``capacity``: memory in GB (10⁹ bytes). For NVIDIA: the "GPU memory" of the named datasheets, as in NIM's
    support matrix (docs.nvidia.com/nim); 180 for B200, of which an HGX or DGX board has eight.
    AMD's 288 is quoted from other sources and not checked against its datasheet.
    ``nvfp4``: whether the FP4 unit takes E4M3 scales for 16 elements; CDNA 4's only takes E8M0 for 32.
    """

    bf16: float
    fp8: float | None
    fp4: float | None
    memory: float
    capacity: float
    source: str
    nvfp4: bool = True


PEAKS: dict[str, Peaks] = {
    "A100": Peaks(312, None, None, 2.04, 80, "NVIDIA A100 80GB SXM datasheet, dense"),
    "H100": Peaks(
        989, 1979, None, 3.35, 80, "NVIDIA H100 SXM datasheet, half of its sparse rates"
    ),
    "H200": Peaks(
        989, 1979, None, 4.8, 141, "NVIDIA H200 SXM datasheet, half of its sparse rates"
    ),
    "GB200": Peaks(
        2500, 5000, 10000, 8, 186, "NVIDIA GB200 NVL72 datasheet, a 72nd, dense"
    ),
    "GB300": Peaks(
        2500, 5000, 15000, 8, 279, "NVIDIA GB300 NVL72 datasheet, a 72nd, dense"
    ),
    "B200": Peaks(
        2250,
        4500,
        9000,
        8,
        180,
        "NVIDIA HGX B200 datasheet, an eighth, dense; memory: B200",
    ),
    "B300": Peaks(
        2250, 4500, 13500, 8, 288, "NVIDIA HGX B300 datasheet, an eighth, dense"
    ),
    "MI350X": Peaks(
        2307, 4614, 9227, 8, 288, "AMD Instinct MI350X datasheet, dense", nvfp4=False
    ),
    "MI355X": Peaks(
        2517, 5033, 10066, 8, 288, "AMD Instinct MI355X datasheet, dense", nvfp4=False
    ),
}
"""Keys are parts of device names, longer ones first where a name has two. A card's own clock and power limit
may keep it below its peak."""


def peaks_of(device_name: str) -> Peaks | None:
    """Find a device's peaks by its name; None for one that is not listed."""
    return next((peaks for name, peaks in PEAKS.items() if name in device_name), None)


def peak_tflops(device_name: str, fmt: str) -> float | None:
    """Find a device's dense peak for operands of a format in TFLOP/s; None if it is unknown."""
    peaks = peaks_of(device_name)
    if peaks is None:
        return None
    if fmt in ("mxfp4", "nvfp4"):
        return peaks.fp4
    if fmt.startswith(("fp8", "mxfp8")):
        return peaks.fp8
    return peaks.bf16
