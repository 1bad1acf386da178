"""The figures of one GEMM, of one of its operands, and of the gradient's noise from the data.

A GEMM: for draws i = 1…n of a recipe's randomness on the same tensors, E_i is the output minus the exact
product Y:

- relative error: √(mean ‖E_i‖² / ‖Y‖²);
- gain: the slope of the output on Y, 1 + mean ⟨E_i, Y⟩ / ‖Y‖²; below 1 the output shrinks;
- bias share: the share of the error's energy common to all draws. The variance V = Σ ‖E_i − Ē‖² / (n − 1) is
  unbiased, so (mean ‖E_i‖² − V) / mean ‖E_i‖² is too, and may be slightly below 0. A recipe without
  randomness has only bias: 1.

The noise of the data (McCandlish et al. 1812.06162, appendix A): let g_p be the mean gradient of each of P
parts of b sequences, and g that of all. Then E‖g_p‖² = ‖G‖² + tr Σ / b and E‖g‖² = ‖G‖² + tr Σ / (bP), where
G is the gradient without noise and Σ the covariance of one sequence's gradient. The two equations give both
unknowns; few parts give a noisy estimate.

Operands are measured in the basis of the rounding, that is after any rotation. Shares are of the non-zero
elements. *Clipped*: above the grid's largest value. *Zeroed*: rounded to zero.

How it fails: an undefined figure (only zeros, an Inf, a NaN) is None.
"""

from __future__ import annotations

import base64
import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ablate.numerics.quantiser import OnGrid, to_blocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


SKETCH = 512
"""Numbers per sketch of an error; the cosine of two sketches errs by about 1 / √512 = 4 %."""
_LARGEST_SAMPLE = 1 << 20


def product_figures(
    exact: Tensor, outputs: Iterable[Tensor], *, per_token: bool
) -> dict[str, Any]:
    """Compare a GEMM's outputs, one per draw, with the exact product, by shares and ratios without units.

    A single output means that the recipe has no randomness. ``per_token``: rows are tokens, which differ from
    step to step, so the sketch describes the error's mean over them.

    ``error_energy`` is mean ‖E_i‖². ``zeros``: share of the output's elements that are exactly zero, mean
    over draws; ``zeros_bf16``: of the exact product's after rounding to bf16, so what is zero in bf16 too.
    ``sketch`` represents the first draw's error, summed over tokens if rows are tokens (see ``sketch_of``).
    """
    energy = _dot(exact, exact)
    total = 0.0
    slope = 0.0
    zeros = 0.0
    count = 0
    common: Tensor | None = None
    sketch: str | None = None
    for output in outputs:
        error = output.to(torch.float32) - exact
        total += _dot(error, error)
        slope += _dot(error, exact)
        zeros += _zeros(output)
        count += 1
        if common is None:
            sketch = sketch_of(error.mean(0) if per_token and error.shape[0] else error)
            common = error
        else:
            common += error
    mean = total / count
    bias: float | None = None
    if common is not None and 0 < mean < math.inf:
        variance = 0.0
        if count > 1:
            variance = (total - _dot(common, common) / count) / (count - 1)
        bias = _known((mean - variance) / mean)
    return {
        "draws": count,
        "relative_error": _root(ratio(mean, energy)),
        "gain": _known(1 + slope / count / energy) if energy else None,
        "bias_share": bias,
        "exact_energy": _known(energy),
        "error_energy": _known(mean),
        "zeros": _known(zeros / count),
        "zeros_bf16": _known(_zeros(exact.to(torch.bfloat16))),
        "sketch": sketch,
    }


def data_noise(
    part_energies: Sequence[float], gradient_energy: float, sequences: int
) -> dict[str, float] | None:
    """Split a gradient's energy into signal, ‖G‖², and data noise, tr Σ over the number of sequences.

    None with fewer than two parts.

    Args:
        part_energies: ‖·‖² of each part's contribution to the gradient; the contributions sum up to it.
        gradient_energy: ‖g‖².
        sequences: number in all parts together; parts have equal sizes.
    """
    parts = len(part_energies)
    of_parts = sum(part_energies) * parts
    if parts < 2 or not math.isfinite(of_parts) or not math.isfinite(gradient_energy):
        return None
    noise = (of_parts - gradient_energy) / (parts - 1)
    return {
        "sequences": sequences,
        "gradient_energy": gradient_energy,
        "noise_energy": noise,
        "signal_energy": gradient_energy - noise,
    }


def sketch_of(error: Tensor) -> str | None:
    """Encode a tensor's direction as ``SKETCH`` bytes in base64: a count sketch with 8 bits per number.

    The sketch sums every ``SKETCH``-th element, with random signs that only depend on the number of elements.
    The cosine of two sketches estimates that of the two tensors (Charikar, Chen, Farach-Colton 2002). None if
    the tensor is all zeros or not finite.
    """
    flat = error.reshape(-1)
    count = flat.numel()
    signed = flat * _signs(count).to(flat.device)
    padding = SKETCH if not count else -count % SKETCH
    sums = torch.nn.functional.pad(signed, (0, padding)).view(-1, SKETCH).sum(0)
    largest = float(sums.abs().max())
    if not largest or not math.isfinite(largest):
        return None
    whole = (sums * (127 / largest)).round().to(torch.int8)
    return base64.b64encode(whole.cpu().numpy().tobytes()).decode()


@lru_cache(maxsize=64)
def _signs(count: int) -> Tensor:
    draw = torch.Generator().manual_seed(count)
    return torch.randint(0, 2, (count,), dtype=torch.int8, generator=draw) * 2 - 1


def _zeros(output: Tensor) -> float:
    return float((output == 0).float().mean())


def _dot(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a.reshape(-1), b.reshape(-1)))


def operand_figures(
    grid: OnGrid, quantised: Tensor, unrotated: Tensor
) -> dict[str, float | None]:
    """Measure one operand of one GEMM, quantised once.

    ``crest_before``, ``crest_after`` its rotation: see ``median_crest``.

    Args:
        grid: the operand before rounding to its grid, [n, k] with the contraction last.
        quantised: dequantised, with every factor applied, fp32 [n, k] in the same basis.
        unrotated: before the rotation, fp32 [n, k].
    """
    exact = grid.rotated
    energy = energy_of(exact)
    non_zero = exact != 0

    def share(elements: Tensor) -> float | None:
        return ratio(float((elements & non_zero).sum()), float(non_zero.sum()))

    return {
        "relative_error": _root(ratio(energy_of(quantised - exact), energy)),
        "gain": ratio(float((quantised * exact).sum()), energy),
        "clipped": share(grid.scaled.abs() > grid.element.max),
        "zeroed": share(quantised == 0),
        "crest_before": median_crest(unrotated, grid.block),
        "crest_after": median_crest(exact, grid.block),
    }


def median_crest(v: Tensor, block: tuple[int, int]) -> float | None:
    """Return the median over blocks of fp32 v [n, k] of the largest magnitude over the root mean square.

    That is what one scale has to span; blocks of zeros are left out.
    """
    if not v.numel() or not bool(torch.isfinite(v).all()):
        return None
    blocks = to_blocks(v, block).flatten(1)
    rms = blocks.square().mean(1).sqrt()
    crest = blocks.abs().amax(1)[rms > 0] / rms[rms > 0]
    if not crest.numel():
        return None
    step = -(-crest.numel() // _LARGEST_SAMPLE)
    return float(torch.quantile(crest[::step], 0.5, interpolation="nearest"))


def energy_of(values: Tensor) -> float:
    """Return ‖values‖², summed in fp32."""
    return float(values.float().square().sum())


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def ratio(part: float, whole: float) -> float | None:
    """Divide; None if the quotient is undefined or not finite."""
    return _known(part / whole) if whole else None


def _root(share: float | None) -> float | None:
    return None if share is None else math.sqrt(share)
