"""The user's cache: what can be made again (compiled kernels, hashes of files, tokens of a notebook)."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """Return the folder of that kind in $ABLATE_CACHE, else $XDG_CACHE_HOME/ablate, else ~/.cache/ablate."""
    own = os.environ.get("ABLATE_CACHE")
    if own:
        return Path(own) / kind
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(shared).expanduser() / "ablate" / kind
