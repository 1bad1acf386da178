"""What ``ablate pilot`` and ``ablate run`` print of made-up runs: ``transcript.txt``.

The pilot trains the baseline alone, and its target is written. Arms whose runs diverge stop; seeds until
settled begin when a look has asked for them. Settings of the command line never take the
place of a study with others. On real Ray: ``tests/test_examples.py`` and ``tests/test_end_to_end.py``.
"""

import shutil
from pathlib import Path
from random import Random
from types import SimpleNamespace

from tests.cli.test_transcripts import hold
from tests.workflow.fakes import loss_at


def test_commands_print_what_they_printed(executor, tmp_path, monkeypatch):
    timed = [
        SimpleNamespace(arm=arm, median=speed, backend_mode="emulated")
        for arm, speed in {"bf16": 100.0, "fp4": 25.0}.items()
    ]
    monkeypatch.setattr(
        "ablate.workflow.pilot.arm_speeds", lambda *_, **__: SimpleNamespace(arms=timed)
    )
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setenv("COLUMNS", "100")
    here = Path(__file__).parent
    shutil.copytree(here / "studies", tmp_path, dirs_exist_ok=True)

    def loss(run, tokens):
        noise = 0.003 * Random(f"{run.config.seed}").random()
        return loss_at(run, tokens) + (0.1 + noise) * (run.arm == "worse")

    executor.loss = loss
    early = lambda run: run.arm == "diverging" and run.config.seed < 2  # noqa: E731
    executor.end = lambda run: "diverged" if early(run) else "finished"
    hold(here / "transcript.txt", tmp_path)
