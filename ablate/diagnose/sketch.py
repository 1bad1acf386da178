"""How alike two errors are, from what a run keeps of them. Without torch, for the analysis."""

from __future__ import annotations

import base64
import math

import numpy as np

SKETCH = 512
"""Numbers that stand for an error from one step to another; their cosine errs by about 1 / √512 = 4 %."""


def sketch_cosine(first: str, second: str) -> float | None:
    """Return the cosine of two sketched tensors: the share of the error that both steps have in common.

    Where an error is C + R with C the same at both steps and R fresh, of the same energy, that is
    ‖C‖² / ‖C + R‖². None of a sketch that is damaged.
    """
    try:
        a, b = (np.frombuffer(base64.b64decode(one), dtype=np.int8).astype(float) for one in (first, second))
    except ValueError:
        return None
    norm = math.sqrt(float(a @ a) * float(b @ b)) if a.shape == b.shape else 0.0
    return float(a @ b) / norm if norm else None
