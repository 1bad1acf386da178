from __future__ import annotations

from dataclasses import asdict

import pytest

from ablate.base.errors import UserError
from ablate.recipes import describe
from ablate.study import load_study
from tests.golden import settings_of

SHORTEST = "name: s\nbaseline: a\ntarget: {val_loss: 3.3}\narms: {a: }\n"


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Write a study file's text and load it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/of")
    (tmp_path / "tok").mkdir(exist_ok=True)

    def load(text: str | bytes):
        (tmp_path / "study.yaml").write_bytes(
            text.encode() if isinstance(text, str) else text
        )
        return load_study("study.yaml", settings_of(text))

    return load


@pytest.fixture
def outcome(study, tmp_path):
    """Load a study file's text; return the lines of its faults, or of what it means."""

    def lines(text: str | bytes) -> list[str]:
        try:
            loaded = study(text)
        except UserError as error:
            shown = [str(problem) for problem in error.problems]
            assert all(
                line.startswith(("study.yaml:", "--set:")) and "\n" not in line
                for line in shown
            )
            return [line.removeprefix("study.yaml:").lstrip() for line in shown]
        return [
            line.replace(str(tmp_path), "HERE")
            for line in meaning(loaded, vars(study(SHORTEST)))
        ]

    return lines


def meaning(loaded, shortest):
    """Yield a line for each part of a study that the shortest one does not have, and one for each arm."""
    for part, value in vars(loaded).items():
        if (
            part not in ("arms", "path", "source", "training")
            and value != shortest[part]
        ):
            yield f"{part}: {value}"
    for arm in loaded.arms:
        settings = [
            f"{section}.{key}={value}"
            for section in ("model", "data", "training", "resources")
            for values in [getattr(arm, section)]
            for key, value in asdict(values).items()
            if value != getattr(type(values)(), key)
        ]
        settings += [
            str(extra) for extra in (arm.description, arm.fork, arm.factors) if extra
        ]
        yield ", ".join([f"arm '{arm.name}': {describe(arm.recipe)}", *settings])
