"""What ``ablate pilot`` and ``ablate run`` print of made-up runs: ``transcript.txt``.

The pilot trains the baseline alone, and its target is written. Arms whose runs diverge stop; seeds until
settled begin when a look has asked for them. Settings of the command line never take the
place of a study with others. On real Ray: ``tests/test_examples.py`` and ``tests/test_end_to_end.py``.
"""

from pathlib import Path
from random import Random
from types import SimpleNamespace

from tests.cli.test_transcripts import hold
from tests.workflow.fakes import STUDY, loss_at

TUNED = f"""\
# my study
{STUDY.replace("seeds: 2", "seeds: 3").replace("tiny", "tuned")}
tune:
  fields: {{learning_rate: {{low: 1.0e-3, high: 1.0e-2, log: true}}}}
  tokens: 2_048
  trials: 2
"""


def test_commands_print_what_they_printed(executor, tmp_path, monkeypatch):
    speeds = {"bf16": 100.0, "fp4": 25.0}.items()
    timed = [
        SimpleNamespace(arm=arm, median=speed, backend_mode="emulated")
        for arm, speed in speeds
    ]
    monkeypatch.setattr(
        "ablate.workflow.pilot.arm_speeds", lambda *_, **__: SimpleNamespace(arms=timed)
    )
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "tuned.yaml").write_text(TUNED)
    (tmp_path / "edited.yaml").write_text(
        STUDY.replace("  fp4:", "  other:").replace("mxfp4", "fp8")
    )
    stopped = (
        STUDY.replace("tiny", "stopped")
        .replace("seeds: 2", "seeds: 4")
        .replace("fp4:", "diverging:")
    )
    (tmp_path / "unstopped.yaml").write_text(stopped)
    (tmp_path / "stopped.yaml").write_text(
        stopped.replace("base:", "stop: {diverged: 2}\nbase:")
    )
    settled = STUDY.replace("tiny", "settled").replace("null", "{val_loss: 3.2}")
    settled = settled.replace("seeds: 2", "seeds: {until: settled, at_most: 4}")
    # Of equal losses there is no interval: such an arm is never settled.
    (tmp_path / "settled.yaml").write_text(f"{settled}  worse: {{recipe: mxfp8}}\n")

    def loss(run, tokens):
        noise = 0.003 * Random(f"{run.config.seed}").random()
        return loss_at(run, tokens) + (0.1 + noise) * (run.arm == "worse")

    executor.loss = loss
    early = lambda run: run.arm == "diverging" and run.config.seed < 2  # noqa: E731
    executor.end = lambda run: "diverged" if early(run) else "finished"
    hold(Path(__file__).with_name("transcript.txt"), tmp_path)
