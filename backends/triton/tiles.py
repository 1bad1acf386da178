"""Tiles of the block-scaled GEMM for which each architecture has a native instruction.

Each was compiled ahead of time and checked (``python -m ablate.backends.testing.ahead``); none has
been timed on FP4 hardware.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tile:
    """The tile of one program and its launch settings."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int = 3


@dataclass(frozen=True, kw_only=True)
class Elements:
    """The kernel's view of a format: dot_scaled's name, elements per byte, elements that share a scale."""

    name: str
    per_byte: int
    block: int


FORMATS = {
    "mxfp4": Elements(name="e2m1", per_byte=2, block=32),
    "nvfp4": Elements(name="e2m1", per_byte=2, block=16),
    "mxfp8": Elements(name="e4m3", per_byte=1, block=32),
}

_BLACKWELL_FP4 = (Tile(bm=128, bn=256, bk=128, warps=8), Tile(bm=128, bn=128, bk=256, warps=4))
_BLACKWELL_FP8 = (Tile(bm=128, bn=256, bk=128, warps=8), Tile(bm=128, bn=128, bk=128, warps=8))
_ONE_SIZE = (Tile(bm=128, bn=128, bk=128, warps=8),)
TILES: dict[tuple[str, str], tuple[Tile, ...]] = {
    **{("sm_90", fmt): _ONE_SIZE for fmt in FORMATS},
    **{(arch, fmt): _BLACKWELL_FP4 for arch in ("sm_100", "sm_103") for fmt in ("mxfp4", "nvfp4")},
    **{(arch, "mxfp8"): _BLACKWELL_FP8 for arch in ("sm_100", "sm_103")},
    **{("sm_120", fmt): _ONE_SIZE for fmt in FORMATS},
    ("gfx950", "mxfp4"): (
        Tile(bm=256, bn=128, bk=256, warps=8, stages=2),
        Tile(bm=128, bn=128, bk=256, warps=4, stages=2),
    ),
    ("gfx950", "mxfp8"): (
        Tile(bm=256, bn=128, bk=128, warps=8, stages=2),
        Tile(bm=128, bn=128, bk=128, warps=4, stages=2),
    ),
}
"""(architecture, format) → tiles, the largest first. Missing entries have no native instruction."""


INTERPRETED = Tile(bm=128, bn=128, bk=256, warps=4)


def choose_tile(arch: str, fmt: str, m: int, n: int, processors: int) -> Tile:
    """Return the largest tile that gives every processor of the device a program, else the smallest."""
    tiles = TILES[arch, fmt]
    for tile in tiles[:-1]:
        if -(-m // tile.bm) * -(-n // tile.bn) >= processors:
            return tile
    return tiles[-1]
