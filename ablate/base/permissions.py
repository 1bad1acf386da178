"""File permissions: the umask decides, but only the owner and the group may ever write."""

from __future__ import annotations

import os


def keep_others_out() -> None:
    """Stop this process and its children from creating files that others can write."""
    os.umask(os.umask(0o077) | 0o002)
