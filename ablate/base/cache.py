"""The user's cache for data that can be recomputed: compiled kernels, file hashes, tokens of a notebook."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """Return the cache folder of a kind in $ABLATE_CACHE, $XDG_CACHE_HOME/ablate or ~/.cache/ablate."""
    own = os.environ.get("ABLATE_CACHE")
    if own:
        return Path(own) / kind
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(shared).expanduser() / "ablate" / kind
