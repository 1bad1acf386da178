"""The similarity of two errors, from the sketches that a run keeps. Without torch, for the analysis."""

from __future__ import annotations

import base64
import math

import numpy as np

SKETCH = 512
"""Numbers per sketch of an error; the cosine of two sketches errs by about 1 / √512 = 4 %."""


def sketch_cosine(first: str, second: str) -> float | None:
    """Return the cosine of two sketched tensors: the share of the error that both steps have in common.

    For an error C + R with C the same at both steps and R drawn anew with equal energy, the cosine is
    ‖C‖² / ‖C + R‖². None for a damaged sketch.
    """
    try:
        a, b = (np.frombuffer(base64.b64decode(one), dtype=np.int8).astype(float) for one in (first, second))
    except ValueError:
        return None
    norm = math.sqrt(float(a @ a) * float(b @ b)) if a.shape == b.shape else 0.0
    return float(a @ b) / norm if norm else None
