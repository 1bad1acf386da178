"""Routes of a mixture that are fixed, or those of another run, step by step."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest

from ablate.base.errors import UserError
from ablate.diagnose.recorder import Recorder
from ablate.recipes import read_recipe
from ablate.run.diagnostics import Diagnostics
from ablate.train.group import Layout
from ablate.train.routes import record, replay
from tests.curves import curve

STEP = 32 * 16  # tokens
FP4 = read_recipe({"gemms": ["fprop", "dgrad", "wgrad"], "stabiliser": "sr"})


@pytest.fixture
def bf16(make_config):
    return make_config(
        model={"experts": 4}, tokens=4 * STEP, eval_every_tokens=2 * STEP, eval_tokens=STEP,
        micro_batch_size=8, evaluate_in="both",
    )  # fmt: skip


def trained(config, tokens, routes=lambda _: None, **options):
    """The rows of a run, and the loads of its experts at each step."""
    loads = []
    see = Diagnostics(every_tokens=STEP, layers=["nothing"], draws=2)

    def note(row):
        if row["kind"] == "load":
            loads.append(row["shares"])

    def observe(trainee):
        routes(trainee)
        return Recorder(trainee, see, note)

    return curve(config, tokens, observe=observe, **options)[1], loads


def test_an_arm_takes_the_routes_of_another_run_in_training_and_evaluation(
    bf16, tokens, tmp_path
):
    path = tmp_path / "routes.jsonl"
    rows = []
    first = trained(bf16, tokens, partial(record, write=rows.append))
    lines = [f"{json.dumps(row)}\n".encode() for row in rows]
    path.write_bytes(b"".join(lines))
    assert first == trained(bf16, tokens)  # the record changes nothing
    fixed = replace(bf16.model, routing="replay")
    same = replace(bf16, model=fixed, replayed=bf16.recipe)
    replayed = partial(replay, path=path)
    assert trained(same, tokens, replayed) == first
    fp4, other = replace(bf16, recipe=FP4), replace(same, recipe=FP4)
    losses, loads = trained(other, tokens, replayed)
    assert loads == first[1] != trained(fp4, tokens)[1]
    assert losses != first[0]
    again = Layout(checkpoint_activations=True)
    assert trained(other, tokens, replayed, layout=again) == (losses, loads)
    # layers × (steps × micro-batches + evaluations × batches)
    assert len(lines) == 2 * (4 * 2 + 2 * 2)
    for content, message in (
        (b"".join(lines[:-1]), "ends before step 3, layer 1"),
        (lines[0].replace(b'"experts": "', b'"experts": "A'), "damaged"),
        (b"nonsense", "cannot be read"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=message):
            trained(other, tokens, replayed)
    with pytest.raises(UserError, match="needs the record"):
        trained(other, tokens)


def test_a_hash_sends_tokens_to_the_same_experts_whatever_the_recipe(bf16, tokens):
    fixed = replace(bf16, model=replace(bf16.model, routing="fixed"))
    _, loads = trained(fixed, tokens)
    assert loads == trained(replace(fixed, recipe=FP4), tokens)[1]
    assert loads != trained(bf16, tokens)[1]
