"""Trainers of the user's own: the example that ships, and what keeps a run from being another arm's."""

import json
import math
import reprlib
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ablate.base.errors import UserError
from ablate.execute import own_trainer
from ablate.execute.pending_runs import RunRequest
from ablate.execute.worker import execute_run
from ablate.layers.state import RecipeState
from ablate.numerics import apply_recipe
from ablate.plan import build_plan
from ablate.recipes import read_recipe
from ablate.run.config import DataConfig, ModelConfig, RunConfig, TrainingConfig
from ablate.store import RunDir
from ablate.study import load_study
from ablate.train import TrainResult
from tests.execute.kill import data, prepare

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model"
ADVANCE = "        state.advance(plan.tokens_per_step)"
SIGNS = {"gemms": ["fprop"], "stabiliser": "rht"}
LATER = {"gemms": ["fprop"], "phases": [{"from_tokens": 64, "recipe": {"gemms": ["dgrad"]}}]}
EVAL = {"kind": "eval", "tokens": 64, "step": 1, "val_loss": 3.0}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return prepare(data(), tmp_path_factory.mktemp("tokens"))


@pytest.fixture
def execute(tmp_path, files):
    """Execute an arm of the example, made small; return its folder and its end."""

    def execute(arm, name, *, advances=True):
        folder = tmp_path / name
        shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True)
        code = (EXAMPLE / "my_model.py").read_text()
        assert ADVANCE in code
        (folder / "my_model.py").write_text(code if advances else code.replace(ADVANCE, "        pass"))
        planned = next(one for one in build_plan(load_study(folder / "study.yaml")).arms if one.name == arm)
        config = planned.config.with_seed(1)
        small = replace(
            config.training, tokens=6 * 64, seq_len=32, batch_size=2, eval_every_tokens=128, eval_tokens=128
        )
        config = replace(config, training=small, model=replace(config.model, options={"width": 32}))
        run = RunDir(folder / "run")
        run.create(asdict(config))
        task = RunRequest(
            run_id="run", arm=arm, run_dir=run.path,
            stop_path=folder / "stop", config=config, tokens_dir=files.folder,
            resources=replace(planned.resources, checkpoint_every_sec=0.0),
        )  # fmt: skip
        return run, execute_run(task)

    return execute


def losses(run):
    rows = map(json.loads, run.metrics_path.read_text().splitlines())
    return [(row["tokens"], row.get("loss"), row.get("val_loss")) for row in rows]


def test_the_example_trains_its_arms_and_goes_on_to_the_same_bits(execute, tmp_path):
    base, end = execute("bf16", "base")
    assert (end.state, end.message) == ("finished", None)
    whole, end = execute("wgrad, later", "whole")
    assert (end.state, end.message) == ("finished", None)
    assert losses(whole)[0] == losses(base)[0]  # the phase has not begun
    assert losses(whole)[-1] != losses(base)[-1]
    (tmp_path / "parts").mkdir()
    for _ in range(3):  # each attempt takes a step, then is stopped
        (tmp_path / "parts" / "stop").touch()
        assert execute("wgrad, later", "parts")[1].state == "interrupted"
    (tmp_path / "parts" / "stop").unlink()
    parts, end = execute("wgrad, later", "parts")
    assert end.state == "finished"
    assert losses(parts) == losses(whole)


def test_a_trainer_that_never_advances_fails_with_a_line(execute):
    run, end = execute("wgrad", "still", advances=False)
    assert end.state == "failed"
    assert end.message is not None
    log = run.attempt_log(1).read_text()
    assert end.message in log
    assert "Traceback" not in log
    assert end.message.partition("my_model.py:train ")[2] == (
        "never called state.advance(): signs of the recipe stayed as at the start, which is another arm "
        "(after each optimizer step call state.advance(tokens), with the tokens of that step)"
    )
    _, end = execute("bf16", "needs none", advances=False)
    assert end.state == "finished"


@pytest.fixture
def trained(monkeypatch):
    """Call a function as a trainer."""

    def trained(function, recipe="bf16", **options):
        monkeypatch.setattr(own_trainer, "load_function", lambda _: function)
        training = TrainingConfig(tokens=150, seq_len=32, batch_size=2, eval_every_tokens=64)  # 3 steps of 64
        config = RunConfig(
            model=ModelConfig(), data=DataConfig(), data_digest="x", vocab_size=64, training=training,
            recipe=read_recipe(recipe), backend="emulated", seed=0,
        )  # fmt: skip
        rows = []
        return own_trainer.call("mine.py:run", config, rows.append, **options), rows

    return trained


def trainer(recipe, *, advance=lambda _: None, steps=3, state="finished", before=lambda _: None):
    def run(config, on_metrics):
        model = torch.nn.Linear(32, 32)
        streams = apply_recipe(model, recipe, total_tokens=1000, quiet=True)
        before(streams)
        for _ in range(steps):
            model(torch.ones(32, 32)).sum().backward()
            advance(streams)
        on_metrics({**EVAL, "tokens": 64 * steps, "step": steps})
        return TrainResult(state=state, tokens=64 * steps, step=steps)

    return run


def by_hand(state):
    state.step, state.tokens = state.step + 1, state.tokens + 64


@pytest.mark.parametrize(
    ("recipe", "options", "said"),
    [
        (SIGNS, {}, r"never called state.advance\(\): signs of"),
        (SIGNS, {"state": "diverged"}, "never called state.advance"),
        (SIGNS, {"before": by_hand}, "never called state.advance"),  # goes on from a checkpoint
        ("te-hybrid-fp8-delayed", {}, "delayed scales of"),
        (LATER, {}, r"never called state.advance\(\): phases of"),
        (LATER, {"advance": lambda state: state.advance()}, r"without tokens: phases of"),
    ],
)
def test_a_state_that_stands_still_fails_the_run(trained, recipe, options, said):
    with pytest.raises(UserError, match=rf"^trainer mine.py:run .*{said}"):
        trained(trainer(recipe, **options), recipe)


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        (SIGNS, {"advance": lambda state: state.advance()}),
        (LATER, {"advance": lambda state: state.advance(np.int64(64))}),
        (LATER, {"advance": by_hand}),
        ({"gemms": ["fprop"]}, {}),
        (SIGNS, {"steps": 0, "state": "interrupted"}),
        (SIGNS, {"steps": 1, "state": "interrupted"}),  # stopped before it could advance
    ],
)
def test_a_state_that_moves_or_need_not_passes(trained, recipe, options):
    assert trained(trainer(recipe, **options), recipe)[0].state == options.get("state", "finished")


@pytest.mark.parametrize(
    "row",
    [
        [64, 3.0],
        {"tokens": 64},
        EVAL | {"kind": "evaluation"},
        {"kind": "eval", "tokens": 64, "step": 1, "loss": 3.0},
        EVAL | {"tokens": 64.5},
        EVAL | {"val_loss": "none"},
        EVAL | {"val_loss": None},
        EVAL | {"val_loss": math.nan},
    ],
)
def test_what_is_no_row_is_refused_in_a_line(trained, row):
    with pytest.raises(UserError) as error:
        trained(lambda _, on_metrics: on_metrics(row))
    assert str(error.value).startswith(f"trainer mine.py:run gave on_metrics {reprlib.repr(row)} (expected")
    assert len(str(error.value).splitlines()) == 1


def test_numbers_of_numpy_and_torch_are_numbers(trained):
    def run(config, on_metrics):
        on_metrics({**EVAL, "tokens": np.int64(64), "val_loss": np.float32(3.0), "loss": torch.ones(())})
        return TrainResult(state="interrupted", tokens=64, step=1)

    assert json.dumps(trained(run)[1]) == json.dumps([{**EVAL, "loss": 1.0}])


@pytest.mark.parametrize("end", [None, {"state": "finished"}, TrainResult(state="done", tokens=1, step=1)])
def test_what_is_no_end_is_refused_in_a_line(trained, end):
    said = r"^trainer mine.py:run returned [^\n]* \(expected TrainResult\(state="
    with pytest.raises(UserError, match=said):
        trained(lambda *_: end)


def at(kind, *tokens):
    return [{**EVAL, "kind": kind, "tokens": one, "step": one // 64} for one in tokens]


def ends(rows, tokens=192, recipe=None):
    def run(config, on_metrics, **_):
        for row in rows:
            on_metrics(row)
        return TrainResult(state="finished", tokens=tokens, step=tokens // 64, recipe=recipe)

    return run


@pytest.mark.parametrize(
    ("rows", "tokens", "said"),
    [
        (at("eval", 64), 64, "finished at 64 tokens, last evaluated at 64 (expected both at the plan's end"),
        (at("eval", 64), 192, "finished at 192 tokens, last evaluated at 64 (expected"),
        (at("train", 64, 192), 192, "finished at 192 tokens, last evaluated at -1 (expected"),
        (at("eval", 64, 10**9), 192, "a row of kind 'eval' at step 15625000, 1,000,000,000 tokens (expected"),
        (at("eval", 128, 64, 192), 192, "a row of kind 'eval' at step 1, 64 tokens (expected steps from 0"),
        (at("eval", 64, 64, 192), 192, "a row of kind 'eval' at step 1, 64 tokens"),
        (at("train", 128) + at("eval", 64, 192), 192, "a row of kind 'eval' at step 1, 64 tokens"),
        ([EVAL | {"tokens": -1}], 192, "a row of kind 'eval' at step 1, -1 tokens"),
        ([EVAL | {"step": -1}], 192, "a row of kind 'eval' at step -1, 64 tokens"),
    ],
)
def test_a_run_is_held_to_its_plan(trained, rows, tokens, said):
    with pytest.raises(UserError) as error:
        trained(ends(rows, tokens))
    assert said in str(error.value)


def test_the_end_may_be_the_budget_or_its_last_whole_step(trained):
    for tokens in (150, 192):
        assert trained(ends(at("train", 64) + at("eval", 64, tokens), tokens))[0].state == "finished"


def test_an_attempt_that_goes_on_begins_there_and_may_have_nothing_left(trained):
    kept = [SimpleNamespace(load=lambda step=step: SimpleNamespace(step=step)) for step in (2, 3)]
    trained(ends(at("eval", 192)), checkpoints=kept[0])
    with pytest.raises(UserError, match=r"at step 1, 64 tokens \(expected steps from 2 on"):
        trained(ends(at("eval", 64, 192)), checkpoints=kept[0])
    trained(ends([]), checkpoints=kept[1])


@pytest.mark.parametrize("applied", [None, "fp8", "bf16"])
def test_a_run_without_its_arms_recipe_fails(trained, applied):
    function = ends(at("eval", 192)) if applied is None else trainer(applied)
    said = "applied no recipe" if applied is None else "called apply_recipe with another recipe"
    with pytest.raises(UserError, match=rf"{said}: its run is not the arm's \(call apply_recipe with"):
        trained(function, SIGNS)


def test_the_recipe_may_be_applied_by_other_means_and_bf16_needs_none(trained):
    trained(ends(at("eval", 192)))
    trained(ends(at("eval", 192), recipe=read_recipe(SIGNS)), SIGNS)
    with pytest.raises(UserError, match="with another recipe"):
        trained(trainer("mxfp4", advance=RecipeState.advance))
