"""The processes of a run's command: what they are started with, and how all of them end.

Every process that the command starts inherits ``ABLATE_COMMAND`` and is found by it, in whatever session; a
daemon that clears its environment is found by its parent, while the worker lives (``family``). ``orphans``
ends them with the worker; the next attempt ends what is left before it begins.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ablate.base.clock import running_clock
from ablate.base.errors import UserError
from ablate.base.files import open_unlinked
from ablate.execute.family import Family, watched
from ablate.execute.orphans import marked
from ablate.run.command import Command, check_inherited, filled, variables_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ablate.run.config import RunConfig

MARK = "ABLATE_COMMAND"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What a run's command is started with, on any of its nodes.

    ``values``: of the templates; ``group``: the study's name, for Weights & Biases.
    """

    config: RunConfig
    values: Mapping[str, Any]
    secrets: Mapping[str, str] = field(repr=False)
    group: str

    @property
    def command(self) -> Command:
        """The run's command."""
        assert isinstance(self.config.trainer, Command)
        return self.config.trainer

    def mark(self, rank: int) -> str:
        """Return by what the command's processes on a node are found, in ``$ABLATE_COMMAND``."""
        return f"{self.values['run_dir']} {rank}"

    @contextlib.contextmanager
    def started(self, log: Path, rank: int = 0) -> Iterator[Family]:
        """Run the command during the block, at whose end all that it has started ends; as ``start``."""
        with watched(lambda: self.start(log, rank)) as family:
            try:
                yield family
            finally:
                end_all(self.mark(rank), self.command.grace_sec, family)

    def start(self, log: Path, rank: int = 0) -> subprocess.Popen[bytes]:
        """End what an earlier attempt has left here, then start the command; it appends to ``log``.

        Raises:
            UserError: the environment would change its arithmetic, a secret is missing, or there is no such
                program.
        """
        command = self.command
        check_inherited(command, os.environ)
        for name in command.secrets:
            if name not in self.secrets and name not in os.environ:
                hint = "set it where `ablate run` starts"
                raise UserError(f"trainer.secrets: {name} is not set", hint=hint)
        end_all(self.mark(rank), command.grace_sec)
        devices = (
            os.environ.get("CUDA_VISIBLE_DEVICES")
            or os.environ.get("HIP_VISIBLE_DEVICES")
            or ""
        )
        values = {**self.values, "node_rank": rank, "devices": devices}
        words = [filled(word, values) for word in command.words]
        environment = {
            **os.environ,
            **self.secrets,
            **variables_of(self.config.recipe, values),
            "WANDB_RUN_ID": Path(str(values["run_dir"])).name,
            "WANDB_RUN_GROUP": self.group,
            "WANDB_RESUME": "allow",
            "MASTER_ADDR": str(values["master_addr"]),
            "MASTER_PORT": str(values["port"]),
            **{name: filled(text, values) for name, text in command.env.items()},
            "ABLATE_RUN_DIR": str(values["run_dir"]),
            MARK: self.mark(rank),
        }
        with open_unlinked(log, "ab") as file:
            try:
                return subprocess.Popen(
                    words, cwd=command.cwd, env=environment, stdin=subprocess.DEVNULL, stdout=file,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                fault = (
                    f"the command does not start: {words[0]}: {error.strerror or error}"
                )
                raise UserError(fault, hint=f"its folder is {command.cwd}") from None


def end_all(mark: str, grace_sec: float, family: Family | None = None) -> None:
    """Ask every process of a command on this node to end, wait, and kill those that have not ended.

    What a process starts after it was asked is its way to end, and is not asked while its parent lives.
    ``family``: the command that this process has started, which has ended when this returns.
    """
    asked: set[int] = set()
    clock = running_clock()
    while True:
        has_ended = family is None or family.poll() is not None
        pids = set(marked(MARK, mark))
        if family is not None:
            pids |= family.pids()
        if has_ended and not pids:
            return
        is_late = clock() >= grace_sec
        asked_and_alive = asked & pids
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
                process = psutil.Process(pid)
                if is_late:
                    process.send_signal(signal.SIGKILL)
                elif (
                    pid not in asked_and_alive and process.ppid() not in asked_and_alive
                ):
                    asked.add(pid)
                    process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
