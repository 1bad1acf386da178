"""Who may write what ablate creates: the umask decides, and others than owner and group never may."""

from __future__ import annotations

import os


def keep_others_out() -> None:
    """Have this process, and those that it starts, create no file that others can write."""
    os.umask(os.umask(0o077) | 0o002)
