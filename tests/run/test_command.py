"""A command's words, what of them is its identity, and what it must not inherit."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from ablate.base.errors import UserError
from ablate.recipes import PRESETS, read_recipe
from ablate.recipes.stacks import Flags
from ablate.run.command import (
    Command,
    filled,
    lacks_proof,
    reading_of,
    variables_of,
)
from ablate.run.command_files import (
    code_of,
    digest_of,
    result_files,
)
from ablate.run.log_rows import LogSource
from tests.golden import check_answers

METRICS = LogSource(preset="megatron")


def command(*words, **other):
    return Command(command=list(words), metrics=METRICS, **other)


def test_only_known_templates_are_replaced():
    values = {"seed": 3, "run_dir": "/store/run"}
    text = '{"a": {"b": {seed}}} ${HOME} {{seed}} {Seed} {run_dir}/x'
    assert filled(text, values) == '{"a": {"b": 3}} ${HOME} {3} {Seed} /store/run/x'


def test_lists_become_words_and_the_studys_own_variables_win():
    written = command(
        "run",
        "{recipe_args}",
        "{args}",
        args=["--x", "1"],
        env={"A": "own", "B": "2"},
        expect=["own"],
    )
    flags = Flags(
        args=("--fp4", "e2m1"),
        env={"A": "recipe's", "C": "3"},
        expect=("fp4",),
        refuse=("bf16",),
        read_in="",
    )
    ready = written.with_recipe(flags)
    assert ready.words == ["run", "--fp4", "e2m1", "--x", "1"]
    assert ready.env == {"A": "own", "B": "2", "C": "3"}
    assert (ready.expect, ready.refuse) == (["own", "fp4"], ["bf16"])
    assert command("run").with_recipe(flags).words == ["run"]
    assert written.words == ["run", "--x", "1"]


def proofs(line):
    """``[recipe, what the trainer says beside its command]``: whether nothing in the log proves the arm's recipe."""
    recipe, options = yaml.safe_load(line)
    trainer = Command(**{"command": ["run"], "metrics": METRICS} | options)
    lacks = lacks_proof(trainer, read_recipe(recipe))
    yield "lacks a proof" if lacks else "needs no more"


def test_which_arms_nothing_in_the_log_proves():
    check_answers(Path(__file__).with_name("proofs.txt"), proofs)


def test_files_that_count(tmp_path):
    (tmp_path / "train.py").write_text("1")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "a.sh").write_text("a")
    (tmp_path / "set.yaml").write_text("lr: 1")
    words = ("python", "train.py", "--config=set.yaml", "--empty=", "--seed={seed}")
    trainer = command(*words, cwd=str(tmp_path), files=["configs/*.sh"])
    assert [path.name for path in result_files(trainer)] == [
        "train.py",
        "set.yaml",
        "a.sh",
    ]
    before = digest_of(trainer)
    (tmp_path / "notes.txt").write_text("no part of it")
    assert digest_of(trainer) == before
    (tmp_path / "configs" / "a.sh").write_text("b")
    assert digest_of(trainer) != before
    with pytest.raises(UserError, match=r"no file 'missing/\*'"):
        result_files(command("run", cwd=str(tmp_path), files=["missing/*"]))


def test_code_is_what_can_be_imported_with_git_and_without(tmp_path, monkeypatch):
    folder = tmp_path / "mine"
    counted = ["kernel.cu", "lib/a.py", "set.txt", "train.py"]
    for name in (
        *counted,
        *[".h/a.py", "__pycache__/a.py", "v/site-packages/a.py", "b.md"],
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    mine = command("run", cwd=str(folder), files=["set.txt"])
    without_git = code_of(mine)
    assert sorted(without_git) == counted
    (folder / ".gitignore").write_text("out.py")
    (folder / "out.py").touch()
    git = ("git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b")
    for words in ("init -q", "add train.py", "commit -qm x", "worktree add -q copy"):
        subprocess.run([*git, *words.split()], check=True)
    assert code_of(mine) == without_git
    monkeypatch.setattr(Path, "read_bytes", lambda _: folder.open())
    with pytest.raises(UserError, match="cannot read: Is a directory"):
        code_of(mine)


def test_the_identity_leaves_out_what_changes_no_result():
    same = command(
        "run", "{seed}", cwd="/a", secrets=["KEY"], expect=["x"], grace_sec=5.0
    )
    assert same.identity == command("run", "{seed}", cwd="/b").identity
    assert command("run", "{seed}", version="1").identity != same.identity
    assert command("run", "{args}", args=["{seed}"]).identity == same.identity
    read_otherwise = replace(same, metrics=LogSource(preset="nanogpt", unit="bits"))
    assert read_otherwise.identity == same.identity
    assert reading_of(read_otherwise) != reading_of(same)


def test_a_recipe_comes_out_of_the_environment_as_it_went_in():
    phases = {
        "preset": "primus-gpt-oss",
        "phases": [{"from_fraction": 0.5, "recipe": "bf16"}],
    }
    for written in (*PRESETS, phases):
        recipe = read_recipe(written)
        variables = variables_of(recipe, {"seed": 3, "tokens": 4096, "steps": 16})
        assert read_recipe(variables.pop("ABLATE_RECIPE")) == recipe
        assert variables == {
            "ABLATE_SEED": "3",
            "ABLATE_TOKENS": "4096",
            "ABLATE_TOKENS_PER_STEP": "256",
        }
