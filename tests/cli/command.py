"""The command line within this process: what a user types, and what the process would come to."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING
from unittest import mock

from ablate.cli import main

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The only line of standard error of a command that was refused."""
        assert self.code == 2, (self.code, self.out, self.err)
        (line,) = self.err.splitlines()
        return line


def ablate(
    command: str, *arguments: object, cwd: Path, storage: object = "runs"
) -> Ended:
    """Run ``command``, as it is typed, with further arguments."""
    words = shlex.split(command)
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(cwd),
        mock.patch.dict(os.environ, {"ABLATE_STORAGE": str(storage)}),
        mock.patch("sys.argv", ["ablate", *words, *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            return Ended(
                code=int(end.code or 0), out=out.getvalue(), err=err.getvalue()
            )
    raise AssertionError("the command line ends by SystemExit")
