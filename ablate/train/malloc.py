"""Keep the memory that a training step frees, because the next step asks for the same sizes again.

By default glibc returns every freed block above a few MiB to the kernel, and the next step pays for each
of its pages again: on tensors of 32 MiB that costs several times as much as quantising them. Without
glibc this does nothing.
"""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST = 2**31 - 1
_MMAP_FROM_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Make this process's malloc reuse large blocks; return whether it accepted."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_FROM_BYTES) and mallopt(_M_TRIM_THRESHOLD, _LARGEST))
