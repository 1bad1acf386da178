from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from ablate.cli import cli
from ablate.errors import UserError


def call(*arguments):
    return CliRunner().invoke(cli, ["report", *map(str, arguments)], catch_exceptions=False)


def test_prints_the_verdict_and_the_paths(ladder):
    result = call("quickstart", "--storage", ladder.path.parent)
    assert result.exit_code == 0
    assert result.output.startswith("Of 5 arms compared with bf16")
    assert str(ladder.path / "report" / "report.html") in result.output.splitlines()


def test_a_partial_study_says_so_first(wide):
    result = call("amd-ladder", "--storage", wide.path.parent)
    assert result.output.startswith("Partial: 1 of 60 runs")


def test_json_prints_the_file_and_nothing_else(ladder, tmp_path):
    result = call("quickstart", "--storage", ladder.path.parent, "--out", tmp_path / "out", "--json")
    assert result.output == (tmp_path / "out" / "report.json").read_text()
    assert json.loads(result.output)["study"] == "quickstart"
    assert not (ladder.path / "report").exists()


def test_a_study_that_never_ran(ladder):
    with pytest.raises(UserError, match="studies here: quickstart"):
        call("quickstat", "--storage", ladder.path.parent)


def test_the_command_line_imports_nothing_heavy():
    script = (
        "import sys, ablate.cli, ablate.cli.report;"
        "print([m for m in ('pandas', 'scipy', 'matplotlib', 'numpy', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_report_leaves_slow_parts_of_scipy_and_pyplot_alone():
    script = (
        "import sys, ablate.reports;"
        "heavy = ('scipy.stats', 'matplotlib.pyplot', 'torch', 'ray', 'mlflow');"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
