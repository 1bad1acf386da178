"""Whether Triton can be used here, and if not, the reason in one line."""

from __future__ import annotations

import os
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

OLDEST_TRITON = (3, 6)
"""The oldest Triton for which the kernels were compiled and checked (``ablate.backends.testing.ahead``)."""

OLDEST_TO_INTERPRET = (3, 8)
"""The oldest Triton whose interpreter supports ``tl.dot_scaled``."""
OLDEST_TO_WIDEN_NVFP4 = (3, 8)
"""The oldest Triton that widens NVFP4 to bf16 without an FP4 unit; older ones cannot compile it."""


def interpreting() -> bool:
    """Whether Triton's kernels run in its interpreter on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache(maxsize=1)
def triton_version() -> tuple[int, ...] | None:
    """Return the version of the installed Triton (including ROCm's), or None."""
    for package in ("triton", "pytorch-triton-rocm", "triton-rocm"):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        return tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    return None


def triton_fault() -> str | None:
    """Return why Triton's kernels cannot run, with a remedy, or None if they can."""
    found = triton_version()
    if found is None:
        return "Triton is not installed (pip install triton)"
    if found < OLDEST_TRITON:
        have, need = (".".join(map(str, one)) for one in (found, OLDEST_TRITON))
        return f"Triton {have} is too old (needs {need}; pip install -U triton)"
    return None
