"""Commands in messages: whoever copies one acts on the same storage, cluster and server."""

from pathlib import Path

import pytest

from ablate.base.command_hints import command_line


@pytest.fixture(autouse=True)
def no_default(monkeypatch, tmp_path):
    monkeypatch.delenv("ABLATE_STORAGE", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("default", [Path("ablate-runs"), Path("./ablate-runs/"), None])
def test_a_default_is_not_said(default):
    assert (
        command_line("run", "my.yaml", storage=default, address=None)
        == "ablate run my.yaml"
    )


def test_the_default_of_this_shell_is_not_said_either(monkeypatch, tmp_path):
    monkeypatch.setenv("ABLATE_STORAGE", str(tmp_path / "there"))
    assert command_line("status", storage=tmp_path / "there") == "ablate status"
    assert (
        command_line("status", storage=Path("ablate-runs"))
        == "ablate status --storage ablate-runs"
    )


def test_what_is_not_the_default_is_said_as_a_shell_takes_it():
    line = command_line(
        "run", "my study.yaml", "--retry-failed", storage=Path("/big disk"), address="ray://head:10001",
        tracking_uri="http://mlflow:5000",
    )  # fmt: skip
    assert line == (
        "ablate run 'my study.yaml' --retry-failed --storage '/big disk' --address ray://head:10001 "
        "--tracking-uri http://mlflow:5000"
    )
