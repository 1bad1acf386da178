"""What ``ablate run`` says of tokens and at its end; the whole verb: ``tests/test_end_to_end.py``."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ablate.cli.run import conclude
from ablate.execute.queue import ExecutionEnd
from ablate.workflow import StudyEnd
from tests.waiting import run_python

STUDY = """\
name: small
baseline: bf16
target: {val_loss: 2.0}
seeds: 1
arms:
  bf16: {recipe: bf16}
  fp8: {recipe: fp8}
"""


AGAIN = "ablate run small.yaml --storage /elsewhere --address ray://head:10001"
RETRY = f"\nFailed runs: 1; try again with: {AGAIN} --retry-failed"
MISSING = f"\nRuns without a result: 1; go on with: {AGAIN}"
GONE = "\nRay has gone; what it ran goes on from its checkpoints."
STOPPED = f"\nStopped. Finished runs are kept; go on with: {AGAIN}"


@pytest.mark.parametrize(
    ("states", "how", "code", "said"),
    [
        (["finished", "diverged"], {}, 0, []),
        (["finished", "failed"], {}, 1, [RETRY]),
        (["finished", "interrupted"], {"problem": "Ray has gone"}, 1, [GONE, MISSING]),
        (["failed", "running"], {}, 1, [RETRY, MISSING]),
        (["finished", "interrupted"], {"interrupted": True}, 130, [STOPPED]),
    ],
)
def test_how_a_call_ends_is_said_with_how_to_go_on(tmp_path, states, how, code, said):
    log, lines = tmp_path / "1.log", []
    log.write_text("".join(f"line {n}\n" for n in range(20)) + "[odd] markup\x1b\n")
    outcome = ExecutionEnd(**{"states": {}, "interrupted": False} | how)
    failed = {"fp8 seed 0: \x1b[31m": log}
    end = StudyEnd(outcome=outcome, states=states, failed=failed, report=None)
    assert conclude(lines.append, end, AGAIN) == code
    first, *printed = lines[:7]
    assert first == f"\nFailed: fp8 seed 0: \\x1b[31m  (log: {log})"
    assert printed == [
        *(f"    line {n}" for n in range(15, 20)),
        "    [odd] markup\\x1b",
    ]
    assert lines[7:] == said


CHOSEN = ("--set", "baseline=fp8", "--only", "fp8", "--only", "bf16", "--seeds", "0")
INTERRUPTED = """
import os, signal, sys

class AtOneImport:
    def find_spec(self, name, *_):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

module, sys.argv[1:] = sys.argv[1], ["run", "small.yaml", *sys.argv[2:]]
sys.meta_path.insert(0, AtOneImport())
from ablate.__main__ import main
main()
"""


@pytest.mark.parametrize("module", ["pydantic", "numpy", "ray"])
def test_ctrl_c_within_an_import_ends_at_once_and_says_how_to_go_on(tmp_path, module):
    """Some modules swallow an exception there, or cannot be imported again."""
    (tmp_path / "small.yaml").write_text(STUDY)
    done = run_python(INTERRUPTED, module, *CHOSEN, cwd=tmp_path, check=False)
    assert done.stderr.endswith(
        f"\nStopped; go on with: ablate run small.yaml {' '.join(CHOSEN)}\n"
    ), done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 130


def test_ctrl_c_before_the_command_line_is_there_ends_the_process(tmp_path):
    done = run_python(INTERRUPTED, "click", cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


TERMINAL = """
from pathlib import Path
from ablate.cli.display import ConsoleListener
from tests.cli.stored import IDS, make_store

with ConsoleListener().executing(make_store(Path({folder!r})), IDS) as poll:
    poll()
"""


def test_on_a_terminal_a_line_stands_below_what_is_said(tmp_path):
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", TERMINAL.format(folder=str(tmp_path))]
    environment, root = (
        os.environ | {"TERM": "xterm", "COLUMNS": "100"},
        Path(__file__).parents[2],
    )
    subprocess.run(command, cwd=root, env=environment, stdout=theirs, check=True)
    shown = os.read(ours, 10_000).decode()
    assert (
        "] bf16 seed 0: finished, val loss 1.5000 nats/token at 10 tokens\r\n" in shown
    )
    assert re.search(r"\[0:00:\d\d\] 1 of 2 done · 1 pending", shown)
