"""Ray's token: read from where Ray keeps it, with a warning if other users of the machine can read it."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def token_path() -> Path:
    """Return the file in which Ray keeps its token."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def use_token() -> str | None:
    """Let Ray send its token to an explicit address; return a warning if others can read the file.

    A cluster with Ray's defaults asks for this token. Ray sends it to an explicit address only if told so
    before it is imported. A cluster without authentication accepts it too.
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
