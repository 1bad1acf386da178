"""Starts the interpreter's tests: the variable must be set before Triton is imported, so in a new process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.exhaustive
@pytest.mark.parametrize("which", ["conformance", "dequantised", "rest"])
def test_kernels_in_the_interpreter(which):
    """The short form is left out: ``.ci/run`` calls it with the oldest and the newest Triton."""
    if which == "rest":
        which = "not conformance and not dequantised and not short_form"
    folder = str(Path(__file__).parent / "interpreted")
    command = [sys.executable, "-m", "pytest", folder, "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, "-m", "", "-k", which],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout or "[100%]" in result.stdout
