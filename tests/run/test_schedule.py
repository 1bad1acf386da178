import dataclasses

import pytest

from ablate.run.config import TrainingConfig
from ablate.run.schedule import decay_begins, learning_rate, plan_steps

BASE = TrainingConfig(
    tokens=100_000,
    seq_len=100,
    batch_size=10,
    learning_rate=1.0,
    warmup_tokens=10_000,
    eval_every_tokens=20_000,
)


def rates(**changes):
    training = dataclasses.replace(BASE, **changes)
    return [learning_rate(training, step) for step in range(plan_steps(training).steps)]


def test_batch_arithmetic():
    plan = plan_steps(dataclasses.replace(BASE, tokens=100_001, micro_batch_size=5))
    assert (plan.tokens_per_step, plan.steps, plan.eval_every_steps, plan.micro_batches) == (1000, 101, 20, 2)
    tiny = plan_steps(dataclasses.replace(BASE, tokens=10, eval_every_tokens=1))
    assert (tiny.steps, tiny.eval_every_steps, tiny.log_every_steps) == (1, 1, 1)


def test_constant_after_warm_up():
    values = rates()
    assert values[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert set(values[10:]) == {1.0}


def test_cosine_ends_at_the_final_ratio():
    values = rates(schedule="cosine", final_lr_ratio=0.1)
    assert values[-1] == pytest.approx(0.1)
    assert values[54] == pytest.approx(0.55)
    assert values[10:] == sorted(values[10:], reverse=True)


def test_wsd_is_stable_then_linear():
    values = rates(schedule="wsd", decay_tokens=20_000, final_lr_ratio=0.0)
    assert set(values[9:80]) == {1.0}
    assert values[-1] == 0.0
    assert values[89] == pytest.approx(0.5)


def test_the_decay_begins_after_the_last_step_at_the_peak():
    training = dataclasses.replace(BASE, schedule="wsd", decay_tokens=20_500)
    begins = decay_begins(training)
    values = rates(schedule="wsd", decay_tokens=20_500)
    assert all(
        (rate < 1.0) == (tokens > begins)
        for tokens, rate in zip(range(1000, 100_001, 1000), values, strict=True)
        if tokens >= 10_000
    )
    assert decay_begins(BASE) is decay_begins(dataclasses.replace(BASE, schedule="cosine")) is None
