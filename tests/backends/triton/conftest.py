"""The oldest and the newest Triton that are supported, beside the installed one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from ablate.backends.device import NEWEST_TRITON, OLDEST_TRITON


@pytest.fixture(
    scope="session", params=[OLDEST_TRITON, NEWEST_TRITON], ids=["oldest", "newest"]
)
def other_triton(request, tmp_path_factory):
    """A Triton's (major, minor) and its folder: in $ABLATE_TRITONS, or installed once for all processes."""
    release = ".".join(map(str, (*request.param, 0)))
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    folder = Path(os.environ.get("ABLATE_TRITONS", shared)) / f"triton-{release}"
    options = [
        "-q",
        "--no-deps",
        "--no-compile",
        "--target",
        str(folder),
        f"triton=={release}",
    ]
    with FileLock(shared / f"triton-{release}.lock"):
        pip = [sys.executable, "-m", "pip", "install", *options]
        if not folder.exists() and subprocess.run(pip, check=False).returncode:
            pytest.skip(f"Triton {release} could not be installed: no package index")
    return request.param, folder
