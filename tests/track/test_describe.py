import pytest

from ablate.store import Status
from ablate.store.lock import LockedRun
from ablate.track import describe

REPORT = describe.report_link("1", "abc")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ([], "none"),
        (None, "none"),
        (["fprop", "dgrad"], "fprop+dgrad"),
        (True, "true"),
        (0.004, "0.004"),
        (32, "32"),
        ("dht", "dht"),
        ({"a": [1]}, '{"a": [1]}'),
    ],
)
def test_values_as_people_write_them(value, shown):
    assert describe.text(value) == shown


def test_params_are_flat_and_short(study):
    config = {"model": {"width": 64, "odd key?": "x"}, "data": {"paths": ["p" * 400] * 20}}
    params = describe.run_params(config, study.typed_plan().arms[1])
    assert params["model.width"] == "64"
    assert params["factor.recipe.gemms"] == "fprop"
    assert params["model.odd key_"] == "x"
    assert len(params["data.paths"]) == 500


def test_tags_of_a_failed_run(study):
    run, arm = LockedRun(id="abc", seed=3), 1
    status = Status(state="failed", tokens=12_345, message="CUDA out of memory")
    environment = {
        "backend": "emulated",
        "backend_mode": "emulated",
        "timing_valid": False,
        "git_commit": "f00",
    }
    tags = describe.run_tags(study.typed_plan(), arm, run, status, environment, report=REPORT)
    assert tags["ablate.state"] == "failed"
    assert tags["ablate.baseline"] == "false"
    assert tags["ablate.timing_valid"] == "false"
    assert tags["mlflow.source.git.commit"] == "f00"
    assert "Failed after 12,345 tokens. CUDA out of memory" in tags["mlflow.note.content"]


def test_an_arm_has_one_colour_and_another_than_its_neighbours(make_study):
    plan = make_study(arms=("bf16", "fprop", "all three"), seeds=(0, 1)).typed_plan()
    colours = [
        {
            describe.run_tags(plan, place, run, Status(), {}, report=REPORT)["mlflow.runColor"]
            for run in arm.runs
        }
        for place, arm in enumerate(plan.arms)
    ]
    assert [len(of_arm) for of_arm in colours] == [1, 1, 1]
    assert len(set.union(*colours)) == 3


def test_note_shows_design_and_stays_within_mlflows_limit(study):
    note = describe.study_note(study.typed_plan(), report=REPORT)
    assert note.startswith("Which GEMM *suffers*?")
    assert "- **Target**: validation loss 2.1 nats per token" in note
    assert "| fprop | Fprop mxfp4; Dgrad+Wgrad bf16 | recipe.gemms: none → fprop | 0, 1 |" in note
    assert "Senseless cells of the design, dropped: 1." in note
    study.plan["arms"] *= 2000
    study.plan["arms"][0]["name"] = study.plan["baseline"] = "a|b"
    note = describe.study_note(study.typed_plan(), report=REPORT)
    assert len(note) < 20_000
    assert r"a\|b" in note
    assert "more arms" in note
