"""Trainers of the user's own: the example that ships, and what keeps a run from being another arm's."""

import json
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
from tests.golden import cases, check

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model"
SMALL = (
    "base.training.tokens=384", "base.training.seq_len=32", "base.training.batch_size=2",
    "base.training.eval_every_tokens=128", "base.training.eval_tokens=128", "base.model.options.width=32",
)  # fmt: skip
SIGNS = {"gemms": ["fprop"], "stabiliser": "rht"}
LATER = {
    "gemms": ["fprop"],
    "phases": [{"from_tokens": 64, "recipe": {"gemms": ["dgrad"]}}],
}
EVAL = {"kind": "eval", "tokens": 64, "step": 1, "val_loss": 3.0}


def test_the_example_trains_its_arms_and_goes_on_to_the_same_bits(tmp_path):
    tokens = prepare(data(), tmp_path / "tokens").folder

    def execute(arm, name):
        """Execute an arm of the example, made small; return its folder and its end."""
        folder = tmp_path / name
        shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True)
        study = load_study(folder / "study.yaml", SMALL)
        config = build_plan(study).arm(arm).config.with_seed(1)
        run = RunDir(folder / "run")
        run.create(asdict(config))
        task = request_of(run, config, tokens, checkpoint_every_sec=0.0)
        return run, execute_run(task)

    def rows_of(arm, name):
        run, end = execute(arm, name)
        assert (end.state, end.message) == ("finished", None)
        return rows_in(run.metrics_path)

    base = rows_of("bf16", "base")
    whole = rows_of("wgrad, later", "whole")
    assert whole[0] == base[0]  # the phase has not begun
    assert whole[-1] != base[-1]
    stop = tmp_path / "parts" / "stop"
    stop.parent.mkdir()
    for _ in range(3):  # each attempt takes a step, then is stopped
        stop.touch()
        assert execute("wgrad, later", "parts")[1].state == "interrupted"
    stop.unlink()
    assert rows_of("wgrad, later", "parts") == whole


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
        # goes on from a checkpoint
        (SIGNS, {"before": by_hand}, "never called state.advance"),
        (
            LATER,
            {"advance": lambda state: state.advance()},
            "without tokens: phases of",
        ),
        (LATER, {"advance": lambda state: state.advance(np.int64(64))}, None),
        # stopped before it could advance
        (SIGNS, {"steps": 1, "state": "interrupted"}, None),
    ],
)
def test_a_state_has_to_move_where_the_recipe_does(trained, recipe, options, said):
    function = trainer(recipe, **options)
    if said is None:
        assert trained(function, recipe)[0].state == options.get("state", "finished")
    else:
        with pytest.raises(UserError, match=rf"^trainer mine.py:run .*{said}"):
            trained(function, recipe)


def ends(rows, ended):
    """A trainer that gives these rows and returns this end, as of JSON."""

    def run(config, on_metrics, **_):
        for row in rows:
            on_metrics(row)
        if not isinstance(ended, dict):
            return ended
        recipe = ended.get("recipe")
        return TrainResult(**ended | {"recipe": recipe and read_recipe(recipe)})

    return run


@pytest.mark.parametrize("case", cases(Path(__file__).with_suffix(".txt")))
def test_a_run_is_held_to_its_plan_and_recipe(trained, case):
    asked, *rows, ended = map(json.loads, case[1].splitlines()[1:-1])
    options = {}
    if "from" in asked:
        kept = SimpleNamespace(step=asked["from"])
        options["checkpoints"] = SimpleNamespace(load=lambda: kept)
    function = ends(rows, ended)
    if "applies" in asked:
        function = trainer(asked["applies"], advance=by_hand)
    try:
        end, _ = trained(function, asked.get("recipe", "bf16"), **options)
        said = end.state
    except UserError as error:
        said = str(error)
    check(case, [said])


def test_numbers_of_numpy_and_torch_are_numbers(trained):
    row = EVAL | {
        "tokens": np.int64(64),
        "val_loss": np.float32(3.0),
        "loss": torch.ones(()),
    }
    _, rows = trained(ends([row], {"state": "interrupted", "tokens": 64, "step": 1}))
    assert json.dumps(rows) == json.dumps([EVAL | {"loss": 1.0}])
