import dataclasses
from pathlib import Path

import yaml

from ablate.run.config import TrainingConfig
from ablate.run.schedule import decay_begins, learning_rate, plan_steps, steady_spans
from tests.golden import check_answers

BASE = TrainingConfig(
    tokens=100_000, seq_len=100, batch_size=10, learning_rate=1.0, warmup_tokens=10_000,
    eval_every_tokens=20_000,
)  # fmt: skip


def rates(**changes):
    training = dataclasses.replace(BASE, **changes)
    return [learning_rate(training, step) for step in range(plan_steps(training).steps)]


def test_batch_arithmetic():
    plan = plan_steps(dataclasses.replace(BASE, tokens=100_001, micro_batch_size=5))
    assert (
        plan.tokens_per_step,
        plan.steps,
        plan.eval_every_steps,
        plan.micro_batches,
    ) == (1000, 101, 20, 2)
    tiny = plan_steps(dataclasses.replace(BASE, tokens=10, eval_every_tokens=1))
    assert (tiny.steps, tiny.eval_every_steps, tiny.log_every_steps) == (1, 1, 1)


def rates_at_steps(line):
    values = rates(**yaml.safe_load(line))
    assert values[9:] == sorted(values[9:], reverse=True)
    for step in (0, 4, 9, 54, 79, 89, 99):
        yield f"{step}: {values[step]:.9g}"


def test_rates():
    check_answers(Path(__file__).with_name("rates.txt"), rates_at_steps)


def test_the_decay_begins_after_the_last_step_at_the_peak():
    changes = {"schedule": "wsd", "decay_tokens": 20_500}
    begins = decay_begins(dataclasses.replace(BASE, **changes))
    for step, rate in enumerate(rates(**changes)[9:], 10):
        assert (rate < 1.0) == (1000 * step > begins)
    assert (
        decay_begins(BASE)
        is decay_begins(dataclasses.replace(BASE, schedule="cosine"))
        is None
    )


def spans(line):
    settings = yaml.safe_load(line)
    switches = settings.pop("switches", ())
    for start, end in steady_spans(settings, switches):
        yield f"{start} to {end}"


def test_where_training_is_known_to_be_steady():
    check_answers(Path(__file__).with_name("spans.txt"), spans)
