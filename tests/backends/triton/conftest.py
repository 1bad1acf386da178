"""The oldest Triton that is supported, beside the installed one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from ablate.backends.device import OLDEST_TRITON

OLDEST = ".".join(map(str, (*OLDEST_TRITON, 0)))


@pytest.fixture(scope="session")
def oldest_triton(tmp_path_factory):
    """The folder that holds the oldest Triton: $ABLATE_OLDEST_TRITON, or installed once for all processes."""
    if given := os.environ.get("ABLATE_OLDEST_TRITON"):
        return Path(given)
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    folder = shared / "oldest-triton"
    options = ["-q", "--no-deps", "--no-compile", "--target", str(folder), f"triton=={OLDEST}"]
    with FileLock(shared / "oldest-triton.lock"):
        pip = [sys.executable, "-m", "pip", "install", *options]
        if not folder.exists() and subprocess.run(pip, check=False).returncode:
            pytest.skip(f"Triton {OLDEST} could not be installed: no package index")
    return folder
