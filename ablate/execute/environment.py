"""The environment of a run, written beside its result: versions, hardware, arithmetic, back end, other work.

A device whose load is unknown is not called idle.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import time
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate._version import __version__
from ablate.base.errors import UserError
from ablate.base.files import hash_of, hash_of_sources
from ablate.run import command_files
from ablate.run.command import Command, reading_of
from ablate.run.log_text import is_cut

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.backends.device import Device
    from ablate.backends.select import Choice
    from ablate.store import RunDir

_RESULT_SOURCES = (
    "backends",
    "data",
    "layers",
    "models",
    "numerics",
    "recipes",
    "run",
    "train",
)
"""Parts of this package that can change a run's result."""

_PACKAGES = ("torch", "numpy", "ray", "tokenizers")

_SETTINGS = (
    "ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG", "DNNL_MAX_CPU_ISA", "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS", "NVIDIA_TF32_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA",
)  # fmt: skip
"""Variables that choose a library's instructions."""
_IDLE_PERCENT = 10.0
"""Above this load a device counts as shared."""
_GPU_TOOLS = (
    ("nvidia-smi --query-gpu=name --format=csv,noheader", r"(.+)"),
    ("rocm-smi --showproductname", r"Card [Ss]eries:\s*(.+)"),
)
_CPU_WINDOW_SEC = 0.5
_GPU_WINDOW_SEC = 1.0
"""A GPU's driver averages the load over at most this time."""


@cache
def code_digest(*more: str) -> str:
    """Hash the sources that can change a run's result, independent of commits.

    Editing a document or the report does not change it; uncommitted changes to those sources do. ``more``:
    rooms whose sources count as well.
    """
    return hash_of_sources(Path(str(files("ablate"))), (*_RESULT_SOURCES, *more))


def code_of(trainer: str | Command | None) -> str:
    """Name the code that trains with this trainer now, as a run's record has it."""
    if isinstance(trainer, Command):
        return command_files.code_digest(command_files.code_of(trainer))
    return code_digest()


def commit_of(folder: Path) -> str | None:
    """Name the code in a folder: its commit and a hash of the changes; None where git tracks none of it.

    So an installed package has none, even inside a repository of the user's.
    """

    def git(*words: str) -> str:
        return _output_of("git", *words, cwd=folder, timeout=30)

    try:
        git("ls-files", "--error-unmatch", ".")
        commit = git("rev-parse", "HEAD")[:12]
        changes = git("diff", "HEAD", "--", ".")
    except (OSError, subprocess.SubprocessError):
        return None
    if changes:
        commit += f"+{hash_of(changes.encode())[:8]}"
    return commit


def _output_of(*command: str, **options: Any) -> str:
    output: str = subprocess.run(
        command, capture_output=True, text=True, check=True, **options
    ).stdout
    return output


def other_work(device: str) -> str | None:
    """Describe other work on a torch device, None if the device is known to be idle.

    Call it while this process does not use the device.
    """
    import torch

    if torch.device(device).type != "cuda":
        # Measured as psutil does it, which a bare image lacks. Waiting for a disk is no work.
        busy_before, idle_before = _cpu_times()
        time.sleep(_CPU_WINDOW_SEC)
        busy, idle = _cpu_times()
        busy -= busy_before
        idle -= idle_before
        load = 100 * busy / max(1, busy + idle)
        if load > _IDLE_PERCENT:
            return f"the processors are {load:.0f} % busy"
        return None
    time.sleep(_GPU_WINDOW_SEC)  # leave this process's own work out of the average
    try:
        load = torch.cuda.utilization(device)
    except Exception:
        # the packages of NVML and AMD SMI may be missing, and raise their own errors
        return "whether others use the GPU is not known (nvidia-ml-py or amdsmi is missing)"
    if load > _IDLE_PERCENT:
        return f"the GPU is {load} % busy"
    return None


def _cpu_times() -> tuple[int, int]:
    """Return the busy and the idle time, summed over all processors, in the kernel's ticks."""
    times = [
        int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    ]
    idle = sum(times[3:5])
    return sum(times) - idle, idle


def why_not_valid(
    mode: str,
    device: Device,
    *,
    threads: int,
    others: str | None,
) -> str | None:
    """Say why a timing does not show the device's own speed, None if it does.

    ``mode``: of the back ends, see ``ablate.backends.select.overall_mode``. ``threads``: computing threads of
    the processor. ``others``: the result of ``other_work``.
    """
    if mode != "native":
        return f"{mode} arithmetic"
    if " MIG " in f"{device.name} ":
        return "a part of a GPU (MIG)"
    cores = len(os.sched_getaffinity(0))
    if device.kind == "cpu" and threads > cores:
        return f"{threads} threads on {cores} CPU cores"
    return others


def describe_environment(
    choices: Sequence[Choice],
    self_tests: Sequence[dict[str, Any]],
    device: str,
    commit: str | None,
    *,
    fingerprints: Sequence[str],
    world_size: int = 1,
) -> dict[str, Any]:
    """Make the content of ``environment.json`` for one attempt (see ``ablate.store``).

    ``fingerprints``: of the arithmetic of all attempts that trained the run, this one's last. ``world_size``:
    the number of devices that train it together.
    """
    import torch

    from ablate.backends.device import TRITON_PACKAGES
    from ablate.backends.select import load_backend, overall_mode

    backends = list(dict.fromkeys(choice.backend for choice in choices))
    gpu_name = None
    gpu_uuid = None
    if device.startswith("cuda"):
        gpu = torch.cuda.get_device_properties(device)
        gpu_name = gpu.name
        gpu_uuid = str(gpu.uuid)
    return {
        **_of_every_run(commit),
        "code": code_digest(),
        **{name: version_of(name) for name in _PACKAGES},
        "triton": next(filter(None, map(version_of, TRITON_PACKAGES)), None),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": gpu_name,
        "gpu_uuid": gpu_uuid,
        "world_size": world_size,
        "fingerprints": list(fingerprints),
        "arithmetic_settings": {
            name: os.environ[name] for name in _SETTINGS if name in os.environ
        },
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "backend": "+".join(backends),
        "backend_mode": overall_mode(choices),
        "backend_detail": "; ".join(load_backend(name).detail() for name in backends),
        "backend_choices": [asdict(choice) for choice in choices],
        "self_tests": list(self_tests),
    }


def _of_every_run(commit: str | None) -> dict[str, Any]:
    return {
        "ablate": __version__,
        "git_commit": commit,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu": cpu_name(),
        "cpus_visible": len(os.sched_getaffinity(0)),
    }


def read_otherwise(run: RunDir, trainer: str | Command | None) -> dict[str, Any]:
    """Return the record of a run whose log was read in another way than now, of any other run nothing.

    Raises:
        UserError: a part of its log was left out.
    """
    reading = reading_of(trainer)
    environment = run.recorded()
    if environment.get("reading", reading) == reading:
        return {}
    if any(map(is_cut, run.attempts.glob("*.log"))):
        raise UserError(
            f"{run.attempts}: a log whose middle was left out (trainer.log_limit_mb) cannot be read in another way",
            hint="leave trainer.metrics, expect, refuse and diverged as they were",
        )
    return environment


def describe_command(
    command: Command,
    commit: str | None,
    num_devices: int,
    *,
    gpus: int,
) -> dict[str, Any]:
    """Make the content of ``environment.json`` for an attempt that a command trains.

    Its arithmetic is not known, only what the study asked it for; the GPU is asked for by its own tool, so
    that this process opens nothing on it.
    """
    return {
        **_of_every_run(commit),
        "code": code_of(command),
        "code_commit": commit_of(Path(command.cwd)),
        "gpu": _gpu_by_its_tool() if gpus else None,
        "world_size": num_devices,
        "software": command.version,
        "backend": "command",
        "backend_mode": "command",
        "backend_detail": "by the command, as configured",
    }


def _gpu_by_its_tool() -> str:
    for command, pattern in _GPU_TOOLS:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            if match := re.search(pattern, _output_of(*command.split(), timeout=60)):
                return match[1].strip()
    return "a GPU of unknown kind"


@cache
def fingerprint(device: str, threads: int) -> str:
    """Hash the bits of the operations that a step uses, on small fixed operands.

    ``threads``: with how many the processor computes from now on. A run's id does not depend on the machine.
    But oneDNN, MKL, ATen and the libraries of GPUs choose their instructions and the order of their sums by
    the machine, by their version and by environment variables. Runs of equal fingerprints add in the same
    order, as far as these operations show it. An operator that the device lacks also changes the fingerprint.
    """
    import torch
    from torch.nn import functional

    from ablate.backends.cpu_bf16 import multiply_in_fp32

    def numbers(rows: int, start: int) -> torch.Tensor:
        """In [-0.5, 0.5), and the same everywhere: integers over a power of two."""
        places = torch.arange(start, start + rows * 320, dtype=torch.int64)
        return (
            ((places * 2654435761 % 2**32).to(torch.float64) / 2**32 - 0.5)
            .float()
            .view(rows, 320)
        )

    torch.set_num_threads(threads)
    multiply_in_fp32()
    parts = []
    for dtype in (torch.float32, torch.bfloat16):
        x = numbers(96, 1).to(device, dtype)
        w = numbers(112, 7).to(device, dtype)
        heads = x[:64].view(1, 4, 16, 320)[..., :32]
        try:
            y = x @ w.t()
            results = (
                y, y @ w, y.t() @ x,
                functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True),
                torch.softmax(x, -1), functional.silu(x), torch.rsqrt(x.pow(2).mean(-1)),
            )  # fmt: skip
            parts += [
                result.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
                for result in results
            ]
        except RuntimeError as error:
            parts.append(type(error).__name__.encode())
    return hash_of(b"".join(parts))[:12]


def version_of(package: str) -> str | None:
    """Return an installed package's version; None if it is missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu_name() -> str:
    """Read the processor's model name from the system."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
