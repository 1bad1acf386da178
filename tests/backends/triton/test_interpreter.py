"""Starts the interpreter's tests: the variable must be set before Triton is imported, so in a new process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


def check_kernels(which, triton=None):
    """Run the interpreter's tests that ``which`` selects, with the installed Triton or one in a folder."""
    folder = Path(__file__).parent / "interpreted"
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(folder),
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    if triton is not None:
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(triton), environment.get("PYTHONPATH", "")]
        )
    result = subprocess.run(
        [*command, "-m", "", "-k", which],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout or "[100%]" in result.stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "which", ["conformance", "dequantised", "not conformance and not dequantised"]
)
def test_kernels_in_the_interpreter_with_every_policy(which):
    check_kernels(which)


@pytest.mark.exhaustive
def test_kernels_in_another_tritons_interpreter(other_triton):
    """In the oldest unary minus is 0 − x, as on GPUs: newer interpreters do not show it."""
    check_kernels("short_form", other_triton[1])
