import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ablate.backends.device import NO_COMPILER
from ablate.cli import VERBS, cli, plan_text
from ablate.cli.common import format_table
from ablate.study.schema import json_schema
from tests.cli.command import ablate

PLAN = [sys.executable, "-m", "ablate", "plan", "quickstart"]
STUDIES = Path(__file__).parent / "transcripts" / "plan"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    return Path(shutil.copytree(STUDIES, tmp_path / "here"))


@pytest.mark.usefixtures("h200")
def test_the_quickstart_takes_a_gpu_and_says_so(here):
    shown = ablate("plan quickstart", cwd=here).out
    sharing = "8 runs at a time on each GPU, 1.0 of 141 GB each (NVIDIA H200)"
    assert (
        f"devices   {sharing}\nstep      one CUDA graph where the device proves it\n"
        in shown
    )
    on_cpu = ablate("plan quickstart --set=base.resources.gpus=0", cwd=here).out
    assert re.search("^(devices|step) ", on_cpu, re.MULTILINE) is None
    of_experts = ablate("plan quickstart --set=base.model.experts=4", cwd=here).out
    assert (
        "step      eager, because the routes of experts depend on the data\n"
        in of_experts
    )
    begun = ablate("run quickstart --set=base.resources.require_native=true", cwd=here)
    assert begun.code == 2
    assert begun.out.splitlines()[0].endswith(
        f"6 arms, 24 runs, {sharing}. Loading torch …"
    )


def test_without_a_gpu_the_quickstart_says_that_it_takes_the_cpu(here):
    said = "devices   the CPU: resources.gpus is auto, and this machine has no GPU that torch can use"
    assert said in ablate("plan quickstart", cwd=here).out


def test_a_missing_compiler_is_named(here, monkeypatch):
    monkeypatch.setattr(plan_text, "cpp_compiler", lambda: None)
    assert f"{NO_COMPILER}\n" in ablate("plan quickstart", cwd=here).out


COMMAND = """
name: c
baseline: a
target: {val_loss: 3}
seeds: 1
base:
  trainer:
    command: ["{python}", train.py, "{seed}", "{steps}", "{args}"]
    metrics: {preset: nanogpt}
    dry_run_args: [--one]
  training: {tokens: 1280, seq_len: 16, batch_size: 4}
arms:
  a: {trainer: {precision: x}}
  b: {trainer: {precision: y, args: ["it's $HOME"], env: {FLAG: "a b"}}}
"""


def test_a_commands_line_can_be_pasted_and_a_dry_run_starts_it(here):
    (here / "train.py").write_text(
        "import os, sys\nprint(sys.argv[1:], os.environ.get('FLAG'))\nsys.exit('--fail' in sys.argv)"
    )
    (here / "c.yaml").write_text(COMMAND)
    shown = ablate("plan c.yaml --dry-run", cwd=here).out
    line = re.search(r" b: (cd .*)", shown)[1]
    pasted = subprocess.check_output(line, shell=True, text=True)
    assert pasted == "['0', '20', \"it's $HOME\"] a b\n"
    assert shown.count("the command ended with exit code 0") == 2
    assert "its last line: ['0', '20', \"it's $HOME\", '--one'] a b\n" in shown
    for words, said in (
        ("[--fail]", "exit code 1; its last line: ['0', '20'"),
        ("[]", "nothing says how"),
    ):
        change = f"--set=base.trainer.dry_run_args={words}"
        assert said in ablate("plan c.yaml --dry-run", change, cwd=here).err


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_every_verb_has_an_example(verb):
    shown = CliRunner().invoke(cli, [verb, "--help"], catch_exceptions=False).output
    assert re.search(rf"Examples?:\s+(.*\n)*?.*ablate {verb}", shown)


@pytest.mark.parametrize(
    ("calls", "heavy"),
    [
        ([[verb, "--help"] for verb in VERBS], "pydantic torch numpy ray rich psutil"),
        ([["recipes"]], "torch"),
        (
            [["plan", "quickstart"]],
            "torch numpy ray mlflow pandas scipy matplotlib tokenizers rich",
        ),
    ],
    ids=["help", "recipes", "plan"],
)
def test_what_has_to_start_fast_imports_nothing_heavy(here, calls, heavy):
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom ablate.cli import cli\n"
        f"for call in {calls}:\n"
        "    assert CliRunner().invoke(cli, call, catch_exceptions=False).exit_code == 0\n"
        f"assert not {set(heavy.split())} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=here, check=True)


def test_what_a_streams_encoding_lacks_is_replaced():
    odd = os.environ | {"PYTHONIOENCODING": "latin-1"}
    command = [*PLAN, "--hardware", "B200"]
    done = subprocess.run(command, env=odd, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"ranges (?: no unit" in done.stdout


def test_a_table_that_is_too_wide_wraps_its_widest_column(monkeypatch):
    monkeypatch.setenv("COLUMNS", "27")
    rows = [("a", "one two three four five", "x" * 10), ("b\nc", "", "y")]
    assert format_table(("n", "words", "last"), rows) == (
        "n  words         last\na  one two       xxxxxxxxxx\n   three four\n   five\nb                y\nc"
    )


def test_a_reader_that_has_seen_enough_is_no_error():
    """As ``ablate plan quickstart --runs | head``."""
    pipe = subprocess.PIPE
    with subprocess.Popen([*PLAN, "--runs"], stdout=pipe, stderr=pipe) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)


def test_the_schema_of_study_files_is_printed(here):
    assert json.loads(ablate("init --schema", cwd=here).out) == json_schema()
