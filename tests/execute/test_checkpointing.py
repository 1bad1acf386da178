from types import SimpleNamespace

import pytest
import torch

from ablate.execute.checkpointing import Keeper
from ablate.store.checkpoints import load_newest
from ablate.store.metrics import MetricsWriter
from ablate.train import Snapshot


@pytest.fixture
def keeper(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as metrics:
        yield lambda **options: Keeper(tmp_path / "c", [metrics], None, **{"every_sec": 60.0} | options)


def test_every_so_many_tokens(keeper):
    every = keeper(every_tokens=100)
    asked = (64, 99, 100, 164, 228, 292, 420)
    assert [tokens for tokens in asked if every.due(tokens)] == [100, 228, 420]


def test_in_time_and_never_more_than_it_may_cost(keeper, monkeypatch):
    from ablate.execute import checkpointing as module

    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    every = keeper(every_sec=10.0)
    assert not every.due(1)
    now[0] = 10.0
    assert every.due(1)
    every._cost_sec, every._last = 1.0, 10.0  # a save took a second: 2 % of the time is one in 50
    now[0] = 59.9
    assert not every.due(2)
    now[0] = 60.1
    assert every.due(2)


def test_an_attempt_that_was_taken_over_writes_none(keeper, tmp_path):
    snapshot = Snapshot(step=3, tensors={"w": torch.ones(2)}, numbers={})
    keeper(lease=SimpleNamespace(is_mine=lambda: False)).save(snapshot)
    assert not (tmp_path / "c").exists()
    keeper(lease=SimpleNamespace(is_mine=lambda: True)).save(snapshot)
    assert load_newest(tmp_path / "c")[0].step == 3
