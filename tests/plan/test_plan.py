import pytest

from ablate.base.errors import Problem, UserError
from ablate.plan import build_plan
from ablate.search.recipes import plan_search
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


def ids_of(planned):
    return {run.id for _, run in planned.runs()}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("name: ladder", "name: other"),
        ("name: ladder", "name: ladder\ndiagnostics: {}"),
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
    assert ids_of(plan(STUDY)) == ids_of(plan(text))


def test_ids_do_not_depend_on_where_the_study_and_its_data_lie(plan):
    text = STUDY.replace(
        "base:\n",
        "base:\n  data: {source: text, paths: [corpus], validation_paths: [v]}\n",
    )
    here, there = plan(text, "here/study.yaml"), plan(text, "there/deeper/study.yaml")
    assert [arm.runs for arm in here.arms] == [arm.runs for arm in there.arms]
    assert here.arms[0].config.data.paths[0].endswith("/here/corpus")
    assert here.arms[0].runs != plan(text.replace("[corpus]", "[other]")).arms[0].runs


def test_data_are_identified_once_and_all_their_faults_reported(study):
    asked = []

    def refuse(data):
        asked.append(data.paths)
        raise UserError(Problem(file=data.paths[0][-1], what="no such file"))

    text = STUDY.split("grid:", maxsplit=1)[0]
    for name in "xy":
        text += f"  {name}: {{data: {{source: text, paths: [{name}]}}}}\n"
    text = text.replace("base:\n", "base:\n  data: {source: text, paths: [b]}\n")
    with pytest.raises(UserError) as caught:
        build_plan(study(text), refuse)
    assert len(asked) == 3
    assert str(caught.value) == "b: no such file\nx: no such file\ny: no such file"


@pytest.mark.parametrize("name", shipped_studies())
def test_the_shipped_studies_can_be_planned(name):
    study = load_study(name)
    assert study.name == name
    if study.search is not None:
        assert len(plan_search(study).times) == 51
        return
    # of the big ones; tests/plan/test_big_studies.py
    planned = build_plan(study, without_data=True)
    arms = len(study.arms) + study.baseline_again
    assert len(list(planned.runs())) == arms * len(study.seeds)
    assert not planned.dropped
    if name == "amd-ladder":
        last = "mxfp4(even); de-oscillated every 200 steps at 3×"  # not of the table
        assert planned.arm("F+D+W deosc").recipe == last
