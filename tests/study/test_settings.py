"""``--set``: what it reads, what it changes, and the line for each mistake."""

from __future__ import annotations

import re
from dataclasses import asdict

import pytest

from ablate.base.errors import UserError
from ablate.plan import build_plan
from ablate.study import load_study

STUDY = """\
name: s
baseline: bf16
target: {val_loss: 3.3}
base:
  training: {tokens: 100_000, learning_rate: 2e-3}
  recipe: mxfp4
arms:
  bf16: {recipe: bf16}
  all three:
  v1.0: {recipe: {rest: fp8, gemms: [fprop]}}
grid:
  from: all three
  factors:
    training.beta1: [0.8, 0.9]
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yaml").write_text(STUDY)
    return lambda *settings: load_study("s.yaml", settings)


def test_a_value_takes_the_place_of_the_file_s(load):
    study = load(
        "base.training.learning_rate=1e-3", "seeds=[3, 4]", "name=s lr", "target.within.cost=5%",
        "arms.v1.0.recipe.stabiliser=sr", "grid.factors.training.beta1=[0.7]", "base.training.grad_clip=null",
        "arms.all three.model.width=64", "grid.factors.training.beta2=[0.9, 0.99]",
    )  # fmt: skip
    (rate,) = {arm.training.learning_rate for arm in study.arms}
    assert (study.name, study.seeds, study.target.within.value) == ("s lr", (3, 4), 0.05)
    assert (rate, study.training.grad_clip) == (1e-3, None)
    arms = {arm.name: arm for arm in study.arms}
    assert arms["v1.0"].recipe_spec.stabiliser == "sr"
    assert arms["beta2=0.99"].training.beta1 == 0.7
    assert arms["beta2=0.99"].model.width == 64
    same = load("base.training.learning_rate=2e-3")
    assert [asdict(arm.training) for arm in same.arms] == [asdict(arm.training) for arm in load().arms]


MISTAKES = """\
seeds
    --set: 'seeds' sets nothing (expected KEY=VALUE, such as base.training.learning_rate=1e-3)
base..model=1
    --set: 'base..model=1' sets nothing (expected KEY=VALUE, such as base.training.learning_rate=1e-3)
seeds=
    --set: seeds: no value (write null for none)
seeds=[1
    --set: seeds: not valid YAML: expected ',' or ']', but got '<stream end>' …
base.training.learning_rte=1
    --set: base.training.learning_rte: unknown key (did you mean 'learning_rate'?)
base.training.learning_rate=fast
    --set: base.training.learning_rate: expected a number, got 'fast'
training.learning_rate=1e-3
    --set: training: unknown key (it belongs in 'base')
learning_rate=1e-3
    --set: learning_rate: unknown key (it belongs in 'base.training')
sedes=3
    --set: sedes: unknown key (did you mean 'seeds'?)
arms.fp8.recipe=fp8
    --set: arms.fp8.recipe: no arm 'fp8' (arms: bf16, all three, v1.0)
arms.bf61.recipe=fp8
    --set: arms.bf61.recipe: no arm 'bf61' (did you mean 'bf16'?)
base.recipe.stabiliser=sr
    --set: base.recipe.stabiliser: base.recipe is 'mxfp4', which has no keys (set it whole: base.recipe=…)
arms.bf16.recipe=pf8
    --set: arms.bf16.recipe: unknown recipe 'pf8' (did you mean 'fp8'?)
baseline=b16
    --set: baseline: no arm 'b16' (did you mean 'bf16'?)
grid.factors.training.beta3=[1]
    --set: grid.factors.training.beta3: unknown factor (did you mean 'training.beta2'?)
base.model={width: 65}
    --set: base.model.width: width 65 is not a multiple of heads 4 (the nearest width is 64 or 72; in arm …
target.val_loss=9
    --set: an untrained model reaches 9: a guess among 256 tokens has a loss of 5.545 …
"""


@pytest.mark.parametrize("mistake", re.split(r"\n(?=\S)", MISTAKES.strip()))
def test_each_mistake_has_its_line(load, mistake):
    setting, line = mistake.split("\n    ")
    with pytest.raises(UserError) as caught:
        build_plan(load(setting))
    (problem,) = caught.value.problems
    assert str(problem) == line or (line.endswith("…") and str(problem).startswith(line[:-2]))


def test_a_setting_that_changes_nothing_is_refused(load):
    with pytest.raises(UserError, match=r"^--set: seeds is given twice$"):
        load("seeds=3", "seeds=4")
    own = [
        f"arms.{arm}.model.width={width}" for arm, width in (("bf16", 32), ("all three", 64), ("v1.0", 96))
    ]
    with pytest.raises(UserError) as caught:
        load("base.model.width=128", *own)
    assert str(caught.value) == "--set: base.model.width: changes nothing: every arm has a value of its own"
    assert load("base.model.width=128", *own[:2])
