"""Compile the CPU quantiser, keep it, load it.

``kernel/`` is compiled on first use (10 to 90 s) into the user's cache. The file name includes a hash of the
source, the compiler's version and the CPU's features, so that a shared home directory can serve different
machines. A new build is moved into place only after it gave the same bits as plain torch, for every policy of
the conformance suite; its hash is kept beside it and compared at each load, so that a file in which a bit has
flipped is built anew. A file that others could have put there is never loaded. The compiler is the system's,
or else that of the Python package ``ziglang``, which needs no root and takes a minute longer: it first builds
its C++ library. Without a compiler plain torch does all the work, many times slower; ``loaded()`` says why.

``torch.utils.cpp_extension`` is not used: it takes 0.7 s to import, needs ninja, and loads whatever is in its
cache.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from ablate.backends.cpu_kernel import Kernel, supports
from ablate.backends.device import NO_COMPILER, cpp_compiler
from ablate.base.files import (
    cache_folder,
    changed_by_others,
    hash_of,
    read_record,
    users_cache_folder,
    write_record,
)

if TYPE_CHECKING:
    from ablate.backends.protocol import Backend

_FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-std=c++17",
    "-shared",
    "-s",
    "-fPIC",
    "-pthread",
)
_WIDTHS = {"AVX512": ("-mprefer-vector-width=512",), "AVX2": ("-mno-avx512f",)}
_NARROW = ("-mno-avx512f", "-mno-avx2")
"""Flags by the instruction set that torch uses, which ATEN_CPU_CAPABILITY can narrow."""
_CACHES_OF_ZIG = ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")
_WRITTEN_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, kw_only=True)
class _Build:
    """How the kernel is built on this machine, and where it is kept. ``compiler`` is a command, or None."""

    compiler: tuple[str, ...] | None
    version: str
    flags: tuple[str, ...]
    sources: dict[str, bytes]
    target: Path


def _build_here() -> _Build:
    kernel = files("ablate.backends").joinpath("kernel")
    sources = {}
    for source in sorted(kernel.iterdir(), key=lambda source: source.name):
        sources[source.name] = source.read_bytes()
    flags: tuple[str, ...] = _FLAGS
    if platform.machine() == "x86_64":
        flags += _WIDTHS.get(torch.backends.cpu.get_cpu_capability(), _NARROW)
    version = ""
    compiler = cpp_compiler()
    if compiler:
        result = subprocess.run(
            [*compiler, "--version"], capture_output=True, text=True, check=False
        )
        version = result.stdout.splitlines()[0] if result.stdout else " ".join(compiler)
    features = platform.processor()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        features = next(
            line for line in lines if line.startswith(("flags", "Features"))
        )
    identity = hashlib.sha256(
        repr((sources, version, features, flags)).encode()
    ).hexdigest()[:16]
    target = folder()[0] / f"{identity}.so"
    return _Build(
        compiler=compiler, version=version, flags=flags, sources=sources, target=target
    )


def _compile(build: _Build) -> str | None:
    """Build the kernel, check its bits, and move it into place; return why that failed, or None."""
    assert build.compiler is not None
    with tempfile.TemporaryDirectory(dir=build.target.parent) as temporary:
        library = Path(temporary) / "kernel.so"
        for name, content in build.sources.items():
            (Path(temporary) / name).write_bytes(content)
        compiler = " ".join(build.compiler)
        result = subprocess.run(
            [
                *build.compiler,
                *build.flags,
                "-o",
                str(library),
                str(Path(temporary) / "kernel.cpp"),
            ],
            env=os.environ | dict.fromkeys(_CACHES_OF_ZIG, temporary),
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode != 0:
            first_line = (result.stderr.strip().splitlines() or ["no message"])[0]
            return f"{compiler} failed: {first_line}"
        if fault := _fault(Kernel(library, build.sources)):
            return f"the build of {compiler} does not give the bits of plain torch ({fault})"
        library.chmod(0o755)
        record = {"hash_of_kernel": hash_of(library.read_bytes()), "compiler": compiler}
        library.replace(build.target)
        write_record(build.target.with_suffix(".json"), record)
    return None


def _fault(kernel: Kernel) -> str | None:
    """Name the first policy for which a kernel's bits differ from plain torch's, and how; else None."""
    from ablate.backends.testing.inputs import POLICIES, label
    from ablate.backends.testing.suite import gradient_back, one_thread, quantised_bits

    backend = cast("Backend", kernel)  # it has what these two checks call
    with one_thread():
        for policy in filter(supports, POLICIES):
            try:
                quantised_bits(backend, "cpu", policy)
                gradient_back(backend, "cpu", policy)
            except AssertionError as error:
                return f"{label(policy)}: {error}"
    return None


def _open_whole(target: Path) -> int | None:
    """Open the library if nobody else can change it and it has not changed since its bits were checked.

    Returns the file's descriptor, so that the checked file is loaded whatever happens to the path.
    """
    with contextlib.suppress(OSError, ValueError, KeyError), target.open("rb") as file:
        known = read_record(target.with_suffix(".json"))["hash_of_kernel"]
        if (
            changed_by_others(_path_of(file.fileno(), target)) is None
            and hash_of(file.read()) == known
        ):
            return os.dup(file.fileno())
    return None


def _path_of(descriptor: int, path: Path) -> Path:
    """Return a path that always leads to the open file; ``path`` itself where the system has none."""
    opened = Path(f"/proc/self/fd/{descriptor}")
    return opened if opened.exists() else path


def folder(kind: str = "kernels") -> tuple[Path, str | None]:
    """Choose the folder of compiled kernels, or another kind; return it, and why it is not the usual one.

    Others must not be able to write there, because this process loads its files, or relies on them.
    """
    why = None
    for here in (cache_folder(kind), users_cache_folder(kind)):
        try:
            here.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = here.stat()
            if status.st_mode & _WRITTEN_BY_OTHERS and status.st_uid == os.geteuid():
                here.chmod(status.st_mode & ~_WRITTEN_BY_OTHERS)
            fault = changed_by_others(here)
        except OSError as error:
            fault = f"{here}: {error.strerror or error}"
        if fault is None:
            return here, why
        why = why or fault
    return _private_folder(kind), why


@lru_cache(maxsize=8)
def _private_folder(kind: str) -> Path:
    private = tempfile.mkdtemp(prefix=f"ablate-{kind}-")
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    return Path(private)


def will_build() -> bool:
    """Whether ``loaded`` must compile first, which takes 10 to 90 s."""
    if (
        os.environ.get("ABLATE_CPU_KERNEL") == "off"
        or (build := _build_here()).compiler is None
    ):
        return False
    descriptor = _open_whole(build.target)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


@lru_cache(maxsize=1)
def loaded() -> tuple[Kernel | None, str]:
    """Load the kernel, built if necessary; return it and one line about it, or None and the reason."""
    if os.environ.get("ABLATE_CPU_KERNEL") == "off":
        return None, "switched off by ABLATE_CPU_KERNEL=off"
    build = _build_here()
    target = build.target
    descriptor = _open_whole(target)
    if descriptor is None and build.compiler is None:
        return None, NO_COMPILER
    try:
        if descriptor is None:
            with target.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                descriptor = _open_whole(target)
                if descriptor is None:
                    if why := _compile(build):
                        return None, why
                    descriptor = _open_whole(target)
        if descriptor is None:
            return None, f"{target} has changed since it was built"
        # The descriptor stays open: the loader knows a library by this path.
        kernel = Kernel(_path_of(descriptor, target), build.sources)
    except OSError as error:
        return None, f"cannot build or load {target}: {error}"
    place, reason = folder()
    detail = f"compiled by {build.version}"
    if reason is not None:
        detail += f" into {place} ({reason})"
    return kernel, detail
