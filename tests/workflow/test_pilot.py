"""What ``ablate pilot`` and ``ablate run`` print of made-up runs: ``transcript.txt``.

The pilot trains the baseline alone, and its target is written. Settings of the command line never take the
place of a study with others. On real Ray: ``tests/test_examples.py`` and ``tests/test_end_to_end.py``.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli.test_transcripts import hold
from tests.workflow.fakes import STUDY

TUNED = f"""\
# my study
{STUDY.replace("seeds: 2", "seeds: 3").replace("tiny", "tuned")}
tune:
  fields: {{learning_rate: {{low: 1.0e-3, high: 1.0e-2, log: true}}}}
  tokens: 2_048
  trials: 2
"""


@pytest.mark.usefixtures("executor")
def test_commands_print_what_they_printed(tmp_path, monkeypatch):
    speeds = {"bf16": 100.0, "fp4": 25.0}.items()
    timed = [SimpleNamespace(arm=arm, median=speed, backend_mode="emulated") for arm, speed in speeds]
    monkeypatch.setattr("ablate.workflow.pilot.arm_speeds", lambda *_, **__: SimpleNamespace(arms=timed))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "tuned.yaml").write_text(TUNED)
    (tmp_path / "edited.yaml").write_text(STUDY.replace("  fp4:", "  other:").replace("mxfp4", "fp8"))
    hold(Path(__file__).with_name("transcript.txt"), tmp_path)
