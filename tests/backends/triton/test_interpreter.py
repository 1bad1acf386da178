"""Starts the interpreter's tests: the variable must be set before Triton is imported, so in a new process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.timeout(1200)
def test_kernels_in_the_interpreter():
    folder = Path(__file__).parent / "interpreted"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(folder), "-q", "--durations=5", "-p", "no:cacheprovider"],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout or "[100%]" in done.stdout
