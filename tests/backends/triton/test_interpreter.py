"""Starts the interpreter's tests: the variable must be set before Triton is imported, so in a new process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.exhaustive
@pytest.mark.parametrize("which", ["conformance", "dequantised", "not conformance and not dequantised"])
def test_kernels_in_the_interpreter_with_every_policy(which):
    folder = Path(__file__).parent / "interpreted"
    command = [sys.executable, "-m", "pytest", str(folder), "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-m", "", "-k", which],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout or "[100%]" in done.stdout
