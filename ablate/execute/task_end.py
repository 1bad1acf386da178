"""How a worker's task has ended, and what an error says of it: whether it may pass, and what to do."""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ablate.base.errors import UserError, first_line, with_type

if TYPE_CHECKING:
    from ablate.store import State

LOST_PEER = "another process of the run is gone"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_PASSING = (*_FULL, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR)


@dataclass(frozen=True, kw_only=True)
class TaskEnd:
    """The end of a task. ``state``: the run's; ``running`` if another process executes it.

    ``transient``: the fault is not the run's own, and a retry may help.
    """

    state: State
    transient: bool = False
    message: str | None = None


def end_of(error: BaseException, gpus: float = 1.0) -> TaskEnd:
    """Turn an error of a process into the end of its task; the message names the usual remedy, if any.

    ``gpus``: those of the process; below 1 it was held to a share of one.
    Faults of the storage, the GPU or another process are ``transient``; a bug or too little memory is not.
    """
    if isinstance(error, KeyboardInterrupt):
        return TaskEnd(state="interrupted", message="interrupted")
    from ablate.backends.select import UnfitDeviceError

    may_pass = False
    message = first_line(error)
    if isinstance(error, OSError):
        may_pass = error.errno in _PASSING
        if error.errno in _FULL:
            message = (
                "no space left on the storage; free some and run the same command again"
            )
        else:
            message = with_type(error)
    elif memory := _exhausted_memory(error):
        message = f"out of {memory} ({message}); a smaller training.micro_batch_size needs less"
        if gpus < 1:
            message += (
                f", and a resources.gpus above its {gpus:g} of the GPU gives it more"
            )
    elif _is_lost_peer(error):
        may_pass = True
        message = LOST_PEER
    elif is_gpu_fault(error):
        may_pass = True
        message = f"the GPU failed: {message}; `ablate check device cuda` tests it"
    elif not isinstance(error, UserError | UnfitDeviceError):
        message = with_type(error)
    state: State = "interrupted" if may_pass else "failed"
    return TaskEnd(state=state, transient=may_pass, message=message)


def _exhausted_memory(error: BaseException) -> str | None:
    if type(error).__name__ == "OutOfMemoryError":
        return "GPU memory"
    if isinstance(error, MemoryError) or "can't allocate memory" in first_line(error):
        return "memory"
    return None


def _is_lost_peer(error: BaseException) -> bool:
    from torch import distributed

    if distributed.is_available() and isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and "gloo/transport" in str(error)


def is_gpu_fault(error: BaseException) -> bool:
    """Whether the GPU, or its driver, failed: the process's state cannot be trusted then."""
    return re.search("(?:CUDA|HIP) error|CUDA driver|NVML", str(error)) is not None
