"""Ray's token: taken from where Ray keeps it, and a warning where others on the machine can read it."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def token_path() -> Path:
    """Return the file that Ray keeps its token in."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def use_token() -> str | None:
    """Have Ray send its token to an explicit address; return a warning if others can read the file.

    A cluster with Ray's defaults asks for this token, and Ray does not send it to an explicit address unless
    told so before it is imported; a cluster without authentication takes it all the same.
    """
    path = token_path()
    try:
        mode = path.stat().st_mode
    except OSError:
        return None
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        return f"Others on this machine can read Ray's token: chmod 600 {path}"
    return None
