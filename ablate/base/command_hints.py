"""The commands that messages offer, with the options that they need to act on the same storage and servers.

An address can contain a password (``https://user:password@host``), so everything that is logged, stored or
shown passes through ``redact`` first.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from ablate.base.files import default_storage

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_USER_INFO = re.compile(r"(\w+://)[^/\s]*@")
_SECRET_QUERY = re.compile(r"([?&](?:password|token|secret)=)[^&\s]+", re.IGNORECASE)


def redact(text: str) -> str:
    """Replace user, password and token of every address in ``text``."""
    return _SECRET_QUERY.sub(r"\1***", _USER_INFO.sub(r"\1***@", text))


def set_words(settings: Iterable[str]) -> list[str]:
    """Return ``--set KEY=VALUE`` for each setting, as words of a command line."""
    return [word for setting in settings for word in ("--set", setting)]


def command_line(
    verb: str, *words: str, storage: Path | None = None, **options: str | None
) -> str:
    """Return a command for the user's shell, such as ``ablate run my.yaml --storage /shared``.

    Args:
        verb: the command, such as ``run``.
        words: its arguments and flags.
        storage: left out if it is None or this shell's default.
        options: other options by name, such as ``address``; logins are hidden, and None leaves one out.
    """
    parts = ["ablate", verb, *words]
    if storage is not None and storage.resolve() != default_storage().resolve():
        parts += ["--storage", str(storage)]
    for name, value in options.items():
        if value is not None:
            parts += [f"--{name.replace('_', '-')}", redact(value)]
    return shlex.join(parts)
