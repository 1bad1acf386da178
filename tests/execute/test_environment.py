"""What a run's record says of the code that trained it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

from ablate.execute import environment
from ablate.execute.environment import code_digest, git_commit


def test_the_digest_covers_the_sources_that_can_change_a_result_and_no_others():
    root = files("ablate")
    names = {
        name for part in environment._RESULT_SOURCES for name, _ in environment._sources(root / part, part)
    }
    assert {
        "numerics/linear.py",
        "train/loop.py",
        "backends/kernel/kernel.cpp",
        "backends/triton/gemm.py",
        "data/batches.py",
        "recipes/presets/amd.py",
        "config.py",
    } <= names
    assert not any(name.startswith(("reports", "cli", "track", "plan")) for name in names)
    assert len(code_digest()) == 12


def test_the_digest_changes_with_such_a_source_alone(monkeypatch, tmp_path):
    shutil.copytree(Path(str(files("ablate"))), tmp_path / "ablate", symlinks=False)
    monkeypatch.setattr(environment, "files", lambda _name: tmp_path / "ablate")

    def digest():
        code_digest.cache_clear()
        return code_digest()

    before = digest()
    (tmp_path / "ablate" / "reports" / "words.py").write_text("changed = True\n")
    assert digest() == before
    with (tmp_path / "ablate" / "train" / "loop.py").open("a") as file:
        file.write("# changed\n")
    assert digest() != before
    code_digest.cache_clear()


def test_an_installed_package_inside_a_users_repository_has_no_commit(tmp_path, monkeypatch):
    package = tmp_path / "venv" / "ablate"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    for command in (
        ["git", "init", "-q"],
        ["git", "-c", "user.name=u", "-c", "user.email=u@x", "commit", "-q", "--allow-empty", "-m", "mine"],
    ):
        subprocess.run(command, cwd=tmp_path, check=True)
    monkeypatch.setattr(environment.ablate, "__file__", str(package / "__init__.py"))
    assert git_commit() is None
    subprocess.run(["git", "add", "venv"], cwd=tmp_path, check=True)
    assert git_commit() is not None
    assert sys.modules["ablate"] is environment.ablate
