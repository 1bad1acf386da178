"""Keep the memory that a training step frees: the next step asks for the same sizes again.

By default glibc hands every freed block above a few MiB back to the kernel, and the next step pays for each
of its pages anew: on tensors of 32 MiB that costs several times as much as quantising them. Elsewhere than on
glibc this does nothing.
"""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST = 2**31 - 1
_MMAP_FROM_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Tell this process's malloc to reuse large blocks; return whether it took it."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_FROM_BYTES) and mallopt(_M_TRIM_THRESHOLD, _LARGEST))
