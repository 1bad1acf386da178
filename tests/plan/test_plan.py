from __future__ import annotations

import pytest

from ablate.base.errors import Problem, UserError
from ablate.plan import build_plan
from ablate.run.ids import run_id
from ablate.store.plan_file import plan_to_json
from ablate.study import load_study, shipped_studies

STUDY = """\
name: ladder
description: a study
baseline: bf16
target: {val_loss: 2.1}
seeds: [0, 5]
base:
  model: {width: 64, heads: 2, ffn: 96, layers: 2}
  training: {tokens: 10_000, eval_every_tokens: 5_000, seq_len: 32, batch_size: 4}
arms:
  bf16:
  fprop: {description: forward, recipe: {gemms: [fprop]}}
grid:
  factors:
    recipe.gemms: {no FP4: [], F: [fprop], all: [fprop, dgrad, wgrad]}
    recipe.stabiliser: {plain: none, SR: sr}
  senseless: drop
"""


def test_every_arm_runs_with_every_seed(plan):
    planned = plan(STUDY)
    assert [arm.name for arm in planned.arms] == ["bf16", "fprop", "F SR", "all plain", "all SR"]
    runs = list(planned.runs())
    assert len({run.id for _, run in runs}) == 10
    assert [(arm.name, run.seed) for arm, run in runs][:3] == [("bf16", 0), ("bf16", 5), ("fprop", 0)]
    for arm, run in runs:
        config = arm.config.with_seed(run.seed)
        assert (run_id(config), config.seed, config.vocab_size) == (run.id, run.seed, 256)
    with pytest.raises(KeyError):
        planned.arm("x")


def test_the_lock_file_is_as_documented(plan):
    lock = plan_to_json(plan(STUDY))
    assert lock["target"] == {"kind": "val_loss", "value": 2.1, "crossing": "confirmed", "within": None}
    assert lock["training"]["tokens"] == 10_000
    fprop = lock["arms"][1]
    del fprop["runs"]
    assert fprop == {
        "name": "fprop", "description": "forward", "again": False, "recipe": "Fprop mxfp4; Dgrad+Wgrad bf16",
        "tokens": 10_112, "factors": {"recipe.gemms": ["fprop"]},
        "differs": {"recipe.gemms": [[], ["fprop"]]}, "folded": ["F plain"],
    }  # fmt: skip
    reason = "stabiliser 'sr' with no FP4 GEMM to act on"
    assert lock["dropped"] == [{"name": "no FP4 SR", "reason": reason}]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("name: ladder", "name: other"),
        ("description: forward", "description: other"),
        ("seeds: [0, 5]", "seeds: [5, 0]\npaired_seeds: true"),
        ("recipe: {gemms: [fprop]}", "recipe: {gemms: [fprop]}, resources: {cpus: 2}"),
        ("  training: {", "  resources: {gpus: 1}\n  training: {"),
        ("tokens: 10_000", "tokens: 10000"),
        ("  fprop:", "  forward only:"),
        ("  bf16:\n", ""),  # written again below the other arm
    ],
)
def test_what_cannot_change_a_result_changes_no_id(plan, old, new):
    text = STUDY.replace(old, new, 1)
    text = text if "  bf16:\n" in text else text.replace("grid:", "  bf16:\ngrid:")
    assert text != STUDY
    ids = [{run.id for _, run in plan(one).runs()} for one in (STUDY, text)]
    assert ids[0] == ids[1]


def test_ids_do_not_depend_on_where_the_study_and_its_data_lie(plan):
    text = STUDY.replace("base:\n", "base:\n  data: {source: text, paths: [corpus], validation_paths: [v]}\n")
    here, there = plan(text, "here/study.yaml"), plan(text, "there/deeper/study.yaml")
    assert [arm.runs for arm in here.arms] == [arm.runs for arm in there.arms]
    assert here.arms[0].config.data.paths[0].endswith("/here/corpus")
    assert here.arms[0].runs != plan(text.replace("[corpus]", "[other]")).arms[0].runs


def test_data_are_identified_once_and_all_their_faults_reported(study):
    asked = []

    def identify(data):
        asked.append(data.paths)
        raise UserError(Problem(file=data.paths[0][-1], what="no such file"))

    text = (
        STUDY.split("grid:", maxsplit=1)[0]
        + "  x: {data: {source: text, paths: [x]}}\n  y: {data: {source: text, paths: [y]}}\n"
    )
    text = text.replace("base:\n", "base:\n  data: {source: text, paths: [b]}\n")
    with pytest.raises(UserError) as caught:
        build_plan(study(text), identify)
    assert len(asked) == 3
    assert str(caught.value) == "b: no such file\nx: no such file\ny: no such file"


def test_differences_are_field_by_field_and_name_only_what_is_real_and_not_the_default(plan):
    rules = "layers: [{last: 1, recipe: {gemms: [fprop]}}], phases: [{from_fraction: 0.5, recipe: bf16}]"
    text = STUDY.split("arms:", maxsplit=1)[0] + (
        "arms:\n"
        "  bf16: {recipe: {hadamard_size: 32}}\n"  # without a Hadamard its size means nothing, but for z
        "  x: {model: {layers: 3}, training: {grad_clip: null}, backend: reference}\n"
        "  y: {recipe: {rest: fp8}, model: {layers: 3}}\n"
        "  z: {from: bf16, recipe: {gemms: [fprop], stabiliser: dht}}\n"
        f"  r: {{recipe: {{gemms: [], {rules}}}}}\n"
    )
    _, x, y, _, ruled = plan(text).arms
    backend = {"backend": ("auto", "reference")}
    assert x.differs == {"model.layers": (2, 3), "training.grad_clip": (1.0, None)} | backend
    assert y.differs["recipe.rest"] == ("bf16", "fp8")
    assert ruled.differs["recipe.layers"] == (None, [{"last": 1, "recipe": {"gemms": ["fprop"]}}])
    half = [{"from_fraction": 0.5, "recipe": "bf16"}]
    assert ruled.differs["recipe.phases"] == (None, half)


PLANNED = [name for name, path in shipped_studies().items() if "\nsearch:" not in path.read_text()]


@pytest.mark.parametrize("name", PLANNED)
def test_the_shipped_studies_can_be_planned(name):
    study = load_study(name)
    planned = build_plan(study, without_data=True)  # of the big ones; tests/plan/test_big_studies.py
    arms = len(study.arms) + study.baseline_again
    assert len(list(planned.runs())) == arms * len(study.seeds)
    assert not planned.dropped
    if name == "amd-ladder":
        last = "mxfp4(even); de-oscillated every 200 steps at 3×"  # not of the table
        assert planned.arm("F+D+W deosc").recipe == last


def test_the_baseline_again_has_its_configuration_and_other_seeds(plan):
    planned = plan(STUDY.replace("seeds: [0, 5]", "seeds: [0, 5]\nbaseline_again: true"))
    base, again = planned.arm("bf16"), planned.arms[-1]
    assert (again.name, again.again, base.again, again.differs) == ("bf16 again", True, False, {})
    assert again.config == base.config
    assert [(run.id, run.seed) for run in again.runs] == [
        (run_id(base.config.with_seed(seed)), seed) for seed in (6, 7)
    ]
