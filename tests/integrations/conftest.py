"""A small problem for every adapter, and what a study puts into the environment of its commands."""

import json

import pytest
import torch

from ablate.recipes import read_recipe
from ablate.run.command import variables_of

NOISY = {"gemms": ["fprop", "dgrad", "wgrad"], "stabiliser": "sr+rht"}
"""Everything that must move with the optimizer's steps: signs per step, noise per pass."""


@pytest.fixture(scope="session")
def batches():
    """32 batches of 4 sequences × 32 tokens."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 64, (32, 4, 32), generator=generator)


def two_layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)
    )


@pytest.fixture
def in_study(tmp_path, monkeypatch):
    """The environment of a study's command; the run's folder."""
    variables = variables_of(
        read_recipe(NOISY), {"seed": 3, "tokens": 4096, "steps": 16}
    )
    for name, value in {"ABLATE_RUN_DIR": str(tmp_path), **variables}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def rows_of(folder):
    return [
        json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()
    ]
