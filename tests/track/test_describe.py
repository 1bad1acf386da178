import json
import math

import pytest

from ablate.base.files import append_line
from ablate.store import Status
from ablate.store.plan_file import ForkPoint, LockedArm, LockedPlan, LockedRun, Target
from ablate.track import describe
from ablate.track.describe import Point, points, read_points, tail_digest

TRAIN = {"kind": "train", "tokens": 4096, "step": 1, "time_unix": 1.7e9 + 0.1234, "loss": 5.5, "lr": 0.004}
EVAL = {"kind": "eval", "tokens": 8192, "step": 2, "time_unix": 1.7e9, "val_loss": 5.0}

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


def test_params_of_a_foreign_model_leave_out_the_built_in_one(study):
    config = {"model": {"width": 128, "layers": 4, "function": "my.py:build", "options": {"width": 64}}}
    params = describe.run_params(config, study.typed_plan().arms[1])
    assert params["model.function"] == "my.py:build"
    assert params["model.options.width"] == "64"
    assert "model.width" not in params
    assert "model.layers" not in params


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


def test_tags_of_an_arm_that_forks():
    run, fork = LockedRun(id="abc", seed=3), ForkPoint(arm="bf16", tokens=4096)
    arms = (LockedArm(name="bf16", runs=(run,)), LockedArm(name="fp4", runs=(run,), fork=fork))
    plan = LockedPlan(study="s", baseline="bf16", target=Target(kind="val_loss", value=2.0), arms=arms)
    tags = [describe.run_tags(plan, i, plan.arms[i].runs[0], Status(), {}, report=REPORT) for i in (0, 1)]
    found = [{key: tag for key, tag in one.items() if "fork" in key or "counted" in key} for one in tags]
    assert found == [
        {},
        {
            "ablate.fork_from": "bf16",
            "ablate.fork_tokens": "4096",
            "ablate.cost_counted_from_tokens": "4096",
        },
    ]


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
    assert "- **Dropped cells**: 1, without sense" in note
    study.plan["arms"] *= 2000
    study.plan["arms"][0]["name"] = study.plan["baseline"] = "a|b"
    note = describe.study_note(study.typed_plan(), report=REPORT)
    assert len(note) < 20_000
    assert r"a\|b" in note
    assert note.endswith("…")


def test_step_is_tokens_and_time_is_the_rows():
    assert points(TRAIN) == [
        Point("train_loss", 5.5, 1_700_000_000_123, 4096),
        Point("learning_rate", 0.004, 1_700_000_000_123, 4096),
    ]
    assert points(EVAL)[1] == Point("val_perplexity", math.exp(5.0), 1_700_000_000_000, 8192)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None, "5", True])
def test_only_finite_numbers(bad):
    assert points(EVAL | {"val_loss": bad}) == []
    assert [point.key for point in points(TRAIN | {"loss": bad})] == ["learning_rate"]


def test_perplexity_that_is_no_number_is_left_out():
    assert [point.key for point in points(EVAL | {"val_loss": 800.0})] == ["val_loss"]


def test_a_second_evaluation_is_a_metric_of_its_own():
    found = {point.key: point.value for point in points(EVAL | {"val_loss_bf16": 4.9})}
    assert found == {"val_loss": 5.0, "val_perplexity": math.exp(5.0), "val_loss_bf16": 4.9}


@pytest.mark.parametrize(
    "row",
    [
        3,
        [],
        {},
        {"kind": "train"},
        {"kind": "other", "tokens": 1, "time_unix": 1},
        {"kind": ["system"], "tokens": 1, "time_unix": 1},
        {"kind": "system", "tokens": 1, "time_unix": 1, "x/../y": 1, "cpu_<b>": 1, "step": 3},
    ],
)
def test_what_is_no_row_gives_nothing(row):
    assert points(row) == []


def test_a_cut_line_waits(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_points(path, 0, 100) == ([], 0)
    append_line(path, TRAIN)
    whole = path.stat().st_size
    with path.open("a") as file:
        file.write('{"kind": "eval", "tok')
    found, offset = read_points(path, 0, 10_000)
    assert (len(found), offset) == (2, whole)
    assert read_points(path, offset, 10_000) == ([], whole)


def test_a_line_longer_than_the_chunk_does_not_block(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_line(path, TRAIN | {"note": "x" * 500})
    append_line(path, EVAL)
    found, offset = read_points(path, 0, 16)
    assert len(found) == 2
    assert len(read_points(path, offset, 16)[0]) == 2


def test_a_line_that_is_no_json_is_passed_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\xff\xfe garbage\n")
    append_line(path, EVAL)
    assert [point.key for point in read_points(path, 0, 10_000)[0]] == ["val_loss", "val_perplexity"]


def test_tail_tells_a_rewound_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_line(path, TRAIN)
    offset = path.stat().st_size
    before = tail_digest(path, offset)
    append_line(path, EVAL)
    assert tail_digest(path, offset) == before
    path.unlink()
    assert tail_digest(path, offset) is None
    append_line(path, TRAIN | {"time_unix": 1.8e9 + 0.1234})
    append_line(path, EVAL)
    assert tail_digest(path, offset) not in (before, None)


DIAGNOSIS = {
    "kind": "diagnosis", "tokens": 4096, "step": 1, "time_unix": 1.7e9, "layer": "blocks.1.ffn.down",
    "gemm": "wgrad", "relative_error": 0.16, "gain": 0.98, "bias_share": None, "sketch": "AAAA",
}  # fmt: skip


def test_a_diagnosis_is_named_by_gemm_figure_and_layer():
    assert points(DIAGNOSIS) == [
        Point("diag/wgrad/relative_error/blocks.1.ffn.down", 0.16, 1_700_000_000_000, 4096),
        Point("diag/wgrad/gain/blocks.1.ffn.down", 0.98, 1_700_000_000_000, 4096),
    ]
    other = [
        point.key for point in points(DIAGNOSIS | {"what_if": "Fprop+Dgrad bf16; Wgrad mxfp4(even) SR×0.9"})
    ]
    assert other == [
        f"what_if/Fprop_Dgrad bf16_ Wgrad mxfp4_even_ SR_0.9/wgrad/{figure}/blocks.1.ffn.down"
        for figure in ("relative_error", "gain")
    ]
    long = [points(DIAGNOSIS | {"what_if": "x" * 200 + end})[0].key for end in "ab"]
    assert long[0] != long[1]
    assert len(long[0]) < 150
    assert points(DIAGNOSIS | {"what_if": 3}) == []
    assert points(DIAGNOSIS | {"layer": "a b<script>"}) == []
    assert points(DIAGNOSIS | {"gemm": "other"}) == []
    assert points(DIAGNOSIS | {"layer": None}) == points(DIAGNOSIS | {"gemm": ["wgrad"]}) == []


def test_the_view_has_our_order_of_charts_unless_it_is_too_long_for_mlflow(study):
    view = json.loads(describe.view(study.typed_plan()))
    charts = [card["metricKey"] for card in view["compareRunCharts"]]
    assert (charts[0], charts[-1]) == ("val_loss", "learning_rate")
    assert {card["metricSectionId"] for card in view["compareRunCharts"]} <= {
        section["uuid"] for section in view["compareRunSections"]
    }
    study.plan["arms"][1]["factors"] = {f"training.field{n}": 1 for n in range(80)}
    long = describe.view(study.typed_plan())
    assert len(long) < 5000
    assert "compareRunCharts" not in long
