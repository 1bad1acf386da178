"""The gradient's noise from the data: the simple noise scale, and the gradient's signal.

McCandlish et al. 1812.06162, appendix A. Let g_p be the mean gradient of each of P parts of b sequences, and
g that of all. Then E‖g_p‖² = ‖G‖² + tr Σ / b and E‖g‖² = ‖G‖² + tr Σ / (bP), where G is the gradient without
noise and Σ the covariance of one sequence's gradient. The two equations give both unknowns; B = tr Σ / ‖G‖²
is the batch, in sequences, at which noise and signal are equal.

How it fails: few parts give a noisy estimate; if ‖G‖² is estimated at or under 0, the scale is None.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True)
class DataNoise:
    """The energy ‖g‖² of a gradient from ``sequences`` sequences, split into noise and signal.

    ``noise_energy`` is tr Σ over the number of sequences, ``signal_energy`` ‖G‖²; ``scale_sequences`` is B.
    """

    sequences: int
    gradient_energy: float
    noise_energy: float
    signal_energy: float

    @property
    def scale_sequences(self) -> float | None:
        """The simple noise scale in sequences."""
        if self.signal_energy <= 0:
            return None
        return self.noise_energy * self.sequences / self.signal_energy


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
        sequences=sequences,
        gradient_energy=gradient_energy,
        noise_energy=noise,
        signal_energy=gradient_energy - noise,
    )
