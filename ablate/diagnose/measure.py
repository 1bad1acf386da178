"""The figures of one GEMM, of one of its operands, and of the gradient's noise from the data.

A GEMM: for draws i = 1…n of a recipe's randomness on the same tensors, E_i is the output minus the exact
product Y:

- relative error: √(mean ‖E_i‖² / ‖Y‖²);
- gain: the slope of the output on Y, 1 + mean ⟨E_i, Y⟩ / ‖Y‖²; below 1 the output shrinks;
- cosine: mean of ⟨Y + E_i, Y⟩ / (‖Y + E_i‖ ‖Y‖);
- bias share: the share of the error's energy common to all draws. The variance V = Σ ‖E_i − Ē‖² / (n − 1) is
  unbiased, so (mean ‖E_i‖² − V) / mean ‖E_i‖² is too, and may be slightly below 0. A recipe without
  randomness has only bias: 1.

The noise of the data (McCandlish et al. 1812.06162, appendix A): let g_p be the mean gradient of each of P
parts of b sequences, and g that of all. Then E‖g_p‖² = ‖G‖² + tr Σ / b and E‖g‖² = ‖G‖² + tr Σ / (bP), where
G is the gradient without noise and Σ the covariance of one sequence's gradient. The two equations give both
unknowns; few parts give a noisy estimate.

Operands are measured in the basis of the rounding, that is after any rotation. Shares are of the non-zero
elements. *Clipped*: above the grid's largest value. *Underflowed*: below its smallest positive value.
*Zeroed*: rounded to zero. ``error_parts`` splits the error in three. A channel is a feature: a column of
x [tokens, in-features], dy [tokens, out-features] or w [out-features, in-features] as stored.

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

from ablate.numerics.quantiser import to_blocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ablate.numerics.quantiser import OnGrid

SKETCH = 512
"""Numbers per sketch of an error; the cosine of two sketches errs by about 1 / √512 = 4 %."""
OUTLIER = 5.0
"""A channel is an outlier if its root mean square is at least this multiple of the median channel's."""
_LARGEST_BLOCK = 128
_LARGEST_SAMPLE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ProductFigures:
    """One GEMM's error over several draws; shares and ratios without units. ``error_energy``: mean ‖E_i‖².

    ``zeros``: share of the output's elements that are exactly zero, mean over draws; ``zeros_bf16``: of the
    exact product's after rounding to bf16, so what is zero in bf16 too.
    ``sketch`` represents the first draw's error, summed over tokens if rows are tokens (see ``sketch_of``).
    """

    draws: int
    relative_error: float | None
    gain: float | None
    cosine: float | None
    bias_share: float | None
    exact_energy: float | None
    error_energy: float | None
    zeros: float | None
    zeros_bf16: float | None
    sketch: str | None


@dataclass(frozen=True, kw_only=True)
class DataNoise:
    """The energy ‖g‖² of a gradient from ``sequences`` sequences, split into noise and signal.

    ``noise_energy`` is tr Σ over the number of sequences, ``signal_energy`` ‖G‖².
    """

    sequences: int
    gradient_energy: float
    noise_energy: float
    signal_energy: float


def product_figures(exact: Tensor, outputs: Iterable[Tensor], *, per_token: bool) -> ProductFigures:
    """Compare a GEMM's outputs, one per draw, with the exact product.

    A single output means that the recipe has no randomness. ``per_token``: rows are tokens, which differ from
    step to step, so the sketch describes the error's mean over them.
    """
    energy = _dot(exact, exact)
    total, slope, cosines, zeros, count = 0.0, 0.0, 0.0, 0.0, 0
    common: Tensor | None = None
    sketch: str | None = None
    for output in outputs:
        error = output.to(torch.float32) - exact
        own, along = _dot(error, error), _dot(error, exact)
        zeros += _zeros(output)
        total, slope, count = total + own, slope + along, count + 1
        norm = math.sqrt(max(energy + 2 * along + own, 0.0)) if math.isfinite(own) else math.nan
        cosines += (energy + along) / (norm * math.sqrt(energy)) if norm and energy else math.nan
        if common is None:
            sketch = sketch_of(error.mean(0) if per_token and error.shape[0] else error)
            common = error
        else:
            common += error
    mean = total / count
    bias: float | None = None
    if common is not None and 0 < mean < math.inf:
        variance = (total - _dot(common, common) / count) / (count - 1) if count > 1 else 0.0
        bias = _known((mean - variance) / mean)
    return ProductFigures(
        draws=count, relative_error=_root(ratio(mean, energy)), cosine=_known(cosines / count),
        gain=_known(1 + slope / count / energy) if energy else None, bias_share=bias,
        exact_energy=_known(energy), error_energy=_known(mean), sketch=sketch,
        zeros=_known(zeros / count), zeros_bf16=_known(_zeros(exact.to(torch.bfloat16))),
    )  # fmt: skip


def data_noise(part_energies: Sequence[float], gradient_energy: float, sequences: int) -> DataNoise | None:
    """Split a gradient's energy into signal and data noise; None with fewer than two parts.

    Args:
        part_energies: ‖·‖² of each part's contribution to the gradient; the contributions sum up to it.
        gradient_energy: ‖g‖².
        sequences: number in all parts together; parts have equal sizes.
    """
    parts = len(part_energies)
    mean = sum(part_energies) / parts * parts**2 if parts else math.nan
    if parts < 2 or not math.isfinite(mean) or not math.isfinite(gradient_energy):
        return None
    noise = (mean - gradient_energy) / (parts - 1)
    return DataNoise(
        sequences=sequences, gradient_energy=gradient_energy,
        noise_energy=noise, signal_energy=gradient_energy - noise,
    )  # fmt: skip


def sketch_of(error: Tensor) -> str | None:
    """Encode a tensor's direction as ``SKETCH`` bytes in base64: a count sketch with 8 bits per number.

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


def _zeros(output: Tensor) -> float:
    return float((output == 0).float().mean().item())


def _dot(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a.reshape(-1), b.reshape(-1)).item())


@dataclass(frozen=True, kw_only=True)
class OutlierFigures:
    """Properties that make a tensor hard to quantise, before or after its rotation.

    ``crest_median`` and ``crest_p99``: largest magnitude over root mean square, of the blocks that share a
    scale. ``mean_share``: share of the tensor's energy in its channels' means. ``outlier_share``: share of
    outlier channels. ``outlier_max``: the largest channel over the median one, by root mean square.
    """

    crest_median: float | None = None
    crest_p99: float | None = None
    mean_share: float | None = None
    outlier_share: float | None = None
    outlier_max: float | None = None


@dataclass(frozen=True, kw_only=True)
class OperandFigures:
    """One operand of one GEMM, quantised once.

    ``gain_by_position``: the slope of quantised on exact values at each place in the block; empty unless
    blocks are rows of at most 128. ``log2_scale``: minimum, 10 %, median, 90 %, maximum of the block scales.
    ``scale_bias``, ``dead_zone``, ``grid_noise``: shares of the error's energy, of sum 1 (``error_parts``).
    """

    relative_error: float | None
    gain: float | None
    gain_by_position: tuple[float | None, ...]
    clipped: float | None
    underflowed: float | None
    zeroed: float | None
    scale_bias: float | None
    dead_zone: float | None
    grid_noise: float | None
    log2_scale: tuple[float, ...]
    before: OutlierFigures
    after: OutlierFigures


def operand_figures(grid: OnGrid, quantised: Tensor, unrotated: Tensor, *, channels: int) -> OperandFigures:
    """Measure an operand.

    Args:
        grid: the operand before rounding to its grid, [n, k] with the contraction last.
        quantised: dequantised, with every factor applied, fp32 [n, k] in the same basis.
        unrotated: before the rotation, fp32 [n, k].
        channels: the dimension of [n, k] along which channels lie, 0 or 1.
    """
    exact, magnitude, element = grid.rotated, grid.scaled.abs(), grid.element
    energy, there = energy_of(exact), exact != 0
    smallest = 2.0 ** (element.min_exponent - element.mantissa_bits)
    clipped, underflowed, zeroed = (
        ratio(float((which & there).sum().item()), float(there.sum().item()))
        for which in (magnitude > element.max, magnitude < smallest, quantised == 0)
    )
    rows, columns = grid.block
    by_position: tuple[float | None, ...] = ()
    if rows == 1 < columns <= _LARGEST_BLOCK and exact.numel():
        sums = ((one * exact).reshape(-1, columns).sum(0).tolist() for one in (quantised, exact))
        by_position = tuple(map(ratio, *sums))
    scales = grid.scales[(grid.scales > 0) & torch.isfinite(grid.scales)].log2()
    quantiles = (_quantile(scales, q) for q in (0.0, 0.1, 0.5, 0.9, 1.0))
    after = outlier_figures(exact, grid.block, channels)
    parts = error_parts(exact, quantised, grid.ideal)
    scale_bias, dead_zone, grid_noise = (ratio(part, sum(parts)) for part in parts)
    same = unrotated.data_ptr() == exact.data_ptr() or torch.equal(unrotated, exact)
    return OperandFigures(
        relative_error=_root(ratio(energy_of(quantised - exact), energy)),
        gain=ratio(float((quantised * exact).sum().item()), energy), gain_by_position=by_position,
        clipped=clipped, underflowed=underflowed, zeroed=zeroed,
        scale_bias=scale_bias, dead_zone=dead_zone, grid_noise=grid_noise,
        log2_scale=tuple(one for one in quantiles if one is not None),
        before=after if same else outlier_figures(unrotated, grid.block, channels), after=after,
    )  # fmt: skip


def error_parts(exact: Tensor, quantised: Tensor, ideal: Tensor) -> tuple[float, float, float]:
    """Split ‖quantised − exact‖² into scale bias, dead zone and grid noise, which add up to it.

    The parts are those of Li, Wu, Shen (arXiv 2605.20402), who split MXFP4's error; here of any format with
    blocks. ``ideal`` is rounded on the same grid, under each block's exact scale (``OnGrid``). Of its error
    the elements that become zero make the *dead zone*, all others the *grid noise*. What the quantised
    operand errs beyond that is the *scale bias*: it is due to the scale in use, such as a power of two, with
    what clips under it, and is below 0 where that scale errs less than the exact one.
    """
    energies = (ideal - exact).double().square()
    dead, noise = (energies[which].sum().item() for which in (ideal == 0, ideal != 0))
    return (quantised - exact).double().square().sum().item() - dead - noise, dead, noise


def outlier_figures(v: Tensor, block: tuple[int, int], channels: int) -> OutlierFigures:
    """Measure the blocks (along k) and channels (along dimension ``channels``) of fp32 v [n, k]."""
    if not v.numel() or not bool(torch.isfinite(v).all()):
        return OutlierFigures()
    blocks = to_blocks(v, block).flatten(1)
    rms = blocks.square().mean(1).sqrt()
    crest = blocks.abs().amax(1)[rms > 0] / rms[rms > 0]
    tokens = 1 - channels
    energy = v.square().sum(tokens)
    mean_energy = v.mean(tokens).square().sum() * v.shape[tokens]
    each = energy.sqrt()
    median = float(each.median().item())
    return OutlierFigures(
        crest_median=_quantile(crest, 0.5), crest_p99=_quantile(crest, 0.99),
        mean_share=ratio(float(mean_energy.item()), float(energy.sum().item())),
        outlier_share=float((each > OUTLIER * median).float().mean().item()) if median else None,
        outlier_max=ratio(float(each.max().item()), median),
    )  # fmt: skip


def _quantile(values: Tensor, q: float) -> float | None:
    if not values.numel():
        return None
    step = -(-values.numel() // _LARGEST_SAMPLE)
    return float(torch.quantile(values.flatten()[::step], q, interpolation="nearest").item())


def energy_of(values: Tensor) -> float:
    """Return ‖values‖², summed in fp32."""
    return float(values.float().square().sum().item())


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def ratio(part: float, whole: float) -> float | None:
    """Divide; None if the quotient is undefined or not finite."""
    return _known(part / whole) if whole else None


def _root(share: float | None) -> float | None:
    return None if share is None else math.sqrt(share)
