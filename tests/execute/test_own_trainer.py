"""Trainers of the user's own: the example that ships, and what keeps a run from being another arm's."""

import json
import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ablate.base.errors import UserError
from ablate.execute import own_trainer
from ablate.execute.worker import execute_run
from ablate.numerics import apply_recipe
from ablate.plan import build_plan
from ablate.recipes import read_recipe
from ablate.store import RunDir
from ablate.study import load_study
from ablate.train import TrainResult
from tests.execute.kill import data, prepare, request_of, rows_in

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model"
SIGNS = {"gemms": ["fprop"], "stabiliser": "rht"}
LATER = {
    "gemms": ["fprop"],
    "phases": [{"from_tokens": 64, "recipe": {"gemms": ["dgrad"]}}],
}
EVAL = {"kind": "eval", "tokens": 64, "step": 1, "val_loss": 3.0}
WHOLE = [EVAL, EVAL | {"tokens": 192, "step": 3}]


def test_the_example_trains_its_arms_and_goes_on_to_the_same_bits(tmp_path):
    tokens = prepare(data(), tmp_path / "tokens").folder

    def execute(arm, name):
        """Execute an arm of the example, made small; return its folder and its end."""
        folder = tmp_path / name
        shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True)
        config = (
            build_plan(load_study(folder / "study.yaml")).arm(arm).config.with_seed(1)
        )
        small = replace(
            config.training,
            tokens=6 * 64,
            seq_len=32,
            batch_size=2,
            eval_every_tokens=128,
            eval_tokens=128,
        )
        config = replace(
            config, training=small, model=replace(config.model, options={"width": 32})
        )
        run = RunDir(folder / "run")
        run.create(asdict(config))
        return run, execute_run(
            request_of(run, config, tokens, checkpoint_every_sec=0.0)
        )

    base, end = execute("bf16", "base")
    assert (end.state, end.message) == ("finished", None)
    whole, end = execute("wgrad, later", "whole")
    assert (end.state, end.message) == ("finished", None)
    # the phase has not begun
    assert rows_in(whole.metrics_path)[0] == rows_in(base.metrics_path)[0]
    assert rows_in(whole.metrics_path)[-1] != rows_in(base.metrics_path)[-1]
    (tmp_path / "parts").mkdir()
    for _ in range(3):  # each attempt takes a step, then is stopped
        (tmp_path / "parts" / "stop").touch()
        assert execute("wgrad, later", "parts")[1].state == "interrupted"
    (tmp_path / "parts" / "stop").unlink()
    parts, end = execute("wgrad, later", "parts")
    assert end.state == "finished"
    assert rows_in(parts.metrics_path) == rows_in(whole.metrics_path)


@pytest.fixture
def trained(monkeypatch, make_config):
    """Call a function as a trainer; return its end and its rows."""

    def trained(function, recipe="bf16", **options):
        monkeypatch.setattr(own_trainer, "load_function", lambda _: function)
        # 3 steps of 64 tokens
        config = make_config(tokens=150, seq_len=32, batch_size=2, eval_every_tokens=64)
        config = replace(config, recipe=read_recipe(recipe))
        rows = []
        return own_trainer.call("mine.py:run", config, rows.append, **options), rows

    return trained


def trainer(
    recipe, *, advance=lambda _: None, steps=3, state="finished", before=lambda _: None
):
    def run(config, on_metrics):
        model = torch.nn.Linear(32, 32)
        streams = apply_recipe(model, recipe, total_tokens=1000)
        before(streams)
        for _ in range(steps):
            model(torch.ones(32, 32)).sum().backward()
            advance(streams)
        on_metrics({**EVAL, "tokens": 64 * steps, "step": steps})
        return TrainResult(state=state, tokens=64 * steps, step=steps)

    return run


def by_hand(state):
    state.step += 1
    state.tokens += 64


@pytest.mark.parametrize(
    ("recipe", "options", "said"),
    [
        (SIGNS, {"state": "diverged"}, "never called state.advance"),
        (
            SIGNS,
            {"before": by_hand},
            "never called state.advance",
        ),  # goes on from a checkpoint
        (
            LATER,
            {"advance": lambda state: state.advance()},
            r"without tokens: phases of",
        ),
        (LATER, {"advance": lambda state: state.advance(np.int64(64))}, None),
        (
            SIGNS,
            {"steps": 1, "state": "interrupted"},
            None,
        ),  # stopped before it could advance
    ],
)
def test_a_state_has_to_move_where_the_recipe_does(trained, recipe, options, said):
    function = trainer(recipe, **options)
    if said is None:
        assert trained(function, recipe)[0].state == options.get("state", "finished")
    else:
        with pytest.raises(UserError, match=rf"^trainer mine.py:run .*{said}"):
            trained(function, recipe)


def at(kind, *tokens):
    return [
        {**EVAL, "kind": kind, "tokens": count, "step": count // 64} for count in tokens
    ]


def ends(rows, tokens=192, **more):
    def run(config, on_metrics, **_):
        for row in rows:
            on_metrics(row)
        return TrainResult(
            **{"state": "finished", "tokens": tokens, "step": tokens // 64} | more
        )

    return run


KEPT = [
    {"checkpoints": SimpleNamespace(load=lambda step=step: SimpleNamespace(step=step))}
    for step in (2, 3)
]


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        *(
            (ends([row]), {}, "gave on_metrics .* \\(expected such as")
            for row in (
                [64, 3.0], {"tokens": 64}, EVAL | {"kind": "evaluation"}, EVAL | {"val_loss": math.nan},
                EVAL | {"tokens": 64.5},
            )
        ),
        (lambda *_: None, {}, r"returned None \(expected TrainResult\(state="),
        (ends([], state="done"), {}, r"returned [^\n]* \(expected TrainResult\(state="),
        (ends(at("eval", 64), 64), {}, "finished at 64 tokens, last evaluated at 64 .expected both at"),
        (ends(at("train", 64, 192)), {}, "finished at 192 tokens, last evaluated at -1"),
        (ends(at("eval", 64, 10**9)), {}, "a row of kind 'eval' at step 15625000, 1,000,000,000 tokens"),
        (ends(at("eval", 64, 64)), {}, "a row of kind 'eval' at step 1, 64 tokens .expected steps from 0"),
        (ends(at("train", 128) + at("eval", 64)), {}, "a row of kind 'eval' at step 1, 64 tokens"),
        (ends([EVAL | {"step": -1}]), {}, "a row of kind 'eval' at step -1, 64 tokens"),
        (ends(WHOLE), KEPT[0], "at step 1, 64 tokens .expected steps from 2 on"),
        (ends(WHOLE[1:]), KEPT[0], None),
        (ends([]), KEPT[1], None),  # nothing is left
        (ends(at("train", 64) + at("eval", 64, 150), 150), {}, None),  # the budget, or its last whole step
        (ends(WHOLE), {}, None),
        (ends(WHOLE), {"recipe": SIGNS}, "applied no recipe: its run is not the arm's .call apply"),
        (trainer("fp8"), {"recipe": SIGNS}, "called apply_recipe with another recipe"),
        (trainer("mxfp4", advance=by_hand), {}, "with another recipe"),
        (ends(WHOLE, recipe=read_recipe(SIGNS)), {"recipe": SIGNS}, None),  # applied by other means
    ],
)  # fmt: skip
def test_a_run_is_held_to_its_plan_and_recipe(trained, function, options, said):
    if said is None:
        assert trained(function, **options)[0].state == "finished"
        return
    with pytest.raises(UserError, match=f"^trainer mine.py:run .*{said}") as error:
        trained(function, **options)
    assert len(str(error.value).splitlines()) == 1


def test_numbers_of_numpy_and_torch_are_numbers(trained):
    row = {
        **EVAL,
        "tokens": np.int64(64),
        "val_loss": np.float32(3.0),
        "loss": torch.ones(()),
    }
    assert json.dumps(trained(ends([row], state="interrupted"))[1]) == json.dumps(
        [{**EVAL, "loss": 1.0}]
    )
