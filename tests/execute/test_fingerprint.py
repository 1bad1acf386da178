"""The fingerprint of a processor's arithmetic."""

import os
import subprocess
import sys

import pytest

from ablate.execute.fingerprint import arithmetic_settings, fingerprint

CODE = "from ablate.execute.fingerprint import fingerprint; print(fingerprint('cpu'))"


def found_with(**variables):
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=os.environ | variables, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.exhaustive
def test_other_instructions_of_aten_or_of_onednn_give_another_one(monkeypatch):
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    here = fingerprint("cpu")
    assert found_with() == here
    assert found_with(ATEN_CPU_CAPABILITY="default", ONEDNN_MAX_CPU_ISA="SSE41") != here


def test_the_variables_that_choose_instructions_are_told(monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert arithmetic_settings()["ONEDNN_MAX_CPU_ISA"] == "AVX2"
