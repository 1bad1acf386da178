"""Build and load the compiled CPU quantiser: built once per machine type, then loaded in milliseconds.

``kernel/`` is compiled on first use (a few seconds) into the user's cache. The file name includes a
hash of the source, the compiler's version and the CPU's features, so that a shared home directory can
serve different machines. A new build is moved into place only after the caller's check accepts it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from ablate.base.files import cache_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC", "-pthread")


def _compiler() -> str | None:
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and (path := shutil.which(name)):
            return path
    return None


def _cpu_features() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(
    compiler: str, sources: dict[str, bytes], target: Path, check: Callable[[ctypes.CDLL], bool]
) -> str | None:
    """Compile, check the bits, move into place. Return None, or the reason of a failure."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        code, library = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        for name, content in sources.items():
            (Path(folder) / name).write_bytes(content)
        vectors = ("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()
        done = subprocess.run(
            [compiler, *_FLAGS, *vectors, "-o", str(library), str(code)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            return f"{compiler} failed: {(done.stderr.strip().splitlines() or ['no message'])[0]}"
        if not check(ctypes.CDLL(str(library))):
            return f"the build of {compiler} does not give the bits of plain torch"
        library.replace(target)
    return None


def load_kernel(check: Callable[[ctypes.CDLL], bool]) -> tuple[ctypes.CDLL | None, str]:
    """Return the library, built if necessary, and one line about it; or None and the reason.

    Args:
        check: returns whether the bits of a new build are right.
    """
    if os.environ.get("ABLATE_CPU_KERNEL") == "off":
        return None, "switched off by ABLATE_CPU_KERNEL=off"
    folder = files("ablate.backends").joinpath("kernel")
    sources = {file.name: file.read_bytes() for file in sorted(folder.iterdir(), key=lambda file: file.name)}
    compiler = _compiler()
    version = ""
    if compiler:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
        version = done.stdout.splitlines()[0] if done.stdout else compiler
    what = repr((sources, version, _cpu_features(), _FLAGS))
    identity = hashlib.sha256(what.encode()).hexdigest()[:16]
    cache = cache_folder("kernels")
    target = cache / f"{identity}.so"
    if not target.exists():
        if compiler is None:
            return None, "no C++ compiler found (install g++ for a several times faster emulation)"
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with _locked(cache / f"{identity}.lock"):
                if not target.exists() and (why := _build(compiler, sources, target, check)):
                    return None, why
        except OSError as error:
            return None, f"cannot build into {cache}: {error}"
    try:
        return ctypes.CDLL(str(target)), f"compiled by {version or 'an earlier compiler'}"
    except OSError as error:
        return None, f"cannot load {target}: {error}"


def openmp_runtime() -> ctypes.CDLL | None:
    """Return the OpenMP library that torch uses in this process, or None if it is unknown."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            path = line.split(maxsplit=5)[-1]
            if Path(path).name.startswith(("libgomp", "libiomp5", "libomp")):
                runtime = ctypes.CDLL(path)
                return runtime if hasattr(runtime, "GOMP_parallel") else None
    return None
