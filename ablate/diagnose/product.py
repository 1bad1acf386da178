"""The distance of one GEMM's output from the exact product, and its part that is the same in every draw.

For draws i = 1…n of a recipe's randomness on the same tensors, E_i is the output minus the exact product Y:

- relative error: √(mean ‖E_i‖² / ‖Y‖²);
- gain: the slope of the output on Y, 1 + mean ⟨E_i, Y⟩ / ‖Y‖²; below 1 the output shrinks;
- cosine: mean of ⟨Y + E_i, Y⟩ / (‖Y + E_i‖ ‖Y‖);
- bias share: the share of the error's energy common to all draws. The variance V = Σ ‖E_i − Ē‖² / (n − 1) is
  unbiased, so (mean ‖E_i‖² − V) / mean ‖E_i‖² is too, and may be slightly below 0. A recipe without
  randomness has only bias: 1.

How it fails: an undefined figure (only zeros, an Inf, a NaN) is None.
"""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ablate.diagnose.sketch import SKETCH

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, kw_only=True)
class ProductFigures:
    """One GEMM's error over several draws; shares and ratios without units. ``error_energy``: mean ‖E_i‖².

    ``sketch`` represents the first draw's error, summed over tokens if rows are tokens (see ``sketch_of``).
    """

    draws: int
    relative_error: float | None
    gain: float | None
    cosine: float | None
    bias_share: float | None
    exact_energy: float | None
    error_energy: float | None
    sketch: str | None


def product_figures(exact: Tensor, outputs: Iterable[Tensor], *, per_token: bool) -> ProductFigures:
    """Compare a GEMM's outputs, one per draw, with the exact product.

    A single output means that the recipe has no randomness. ``per_token``: rows are tokens, which differ from
    step to step, so the sketch describes the error's mean over them.
    """
    energy = _dot(exact, exact)
    total, slope, cosines, count = 0.0, 0.0, 0.0, 0
    common: Tensor | None = None
    sketch: str | None = None
    for output in outputs:
        error = output.to(torch.float32) - exact
        own, along = _dot(error, error), _dot(error, exact)
        total, slope, count = total + own, slope + along, count + 1
        norm = math.sqrt(max(energy + 2 * along + own, 0.0)) if math.isfinite(own) else math.nan
        cosines += (energy + along) / (norm * math.sqrt(energy)) if norm and energy else math.nan
        if common is None:
            sketch = sketch_of(error.mean(0) if per_token and error.shape[0] else error)
            common = error
        else:
            common += error
    assert common is not None
    mean = total / count
    bias: float | None = 1.0 if mean > 0 else None
    if count > 1 and mean > 0:
        variance = (total - _dot(common, common) / count) / (count - 1)
        bias = _known((mean - variance) / mean)
    return ProductFigures(
        draws=count,
        relative_error=_root(_ratio(mean, energy)),
        gain=_known(1 + slope / count / energy) if energy else None,
        cosine=_known(cosines / count),
        bias_share=bias if math.isfinite(mean) else None,
        exact_energy=_known(energy),
        error_energy=_known(mean),
        sketch=sketch,
    )


def sketch_of(error: Tensor) -> str | None:
    """Return a tensor's direction as ``SKETCH`` bytes in base64: a count sketch with 8 bits per number.

    The sketch sums every ``SKETCH``-th element, with random signs that only depend on the number of elements.
    The cosine of two sketches estimates that of the two tensors (Charikar, Chen, Farach-Colton 2002). None if
    the tensor is all zeros or not finite.
    """
    flat = error.reshape(-1)
    length = max(-(-flat.numel() // SKETCH), 1) * SKETCH
    signed = torch.nn.functional.pad(flat * _signs(flat.numel()).to(flat.device), (0, length - flat.numel()))
    sums = signed.view(-1, SKETCH).sum(0)
    largest = float(sums.abs().max().item())
    if not largest or not math.isfinite(largest):
        return None
    whole = (sums * (127 / largest)).round().to(torch.int8)
    return base64.b64encode(whole.cpu().numpy().tobytes()).decode()


@lru_cache(maxsize=64)
def _signs(count: int) -> Tensor:
    bits = torch.randint(0, 2, (count,), dtype=torch.int8, generator=torch.Generator().manual_seed(count))
    return bits * 2 - 1


def _dot(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a.reshape(-1), b.reshape(-1)).item())


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _ratio(part: float, whole: float) -> float | None:
    return _known(part / whole) if whole else None


def _root(value: float | None) -> float | None:
    return None if value is None else math.sqrt(value)
