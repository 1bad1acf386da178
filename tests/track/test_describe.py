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
DIAGNOSIS = {
    "kind": "diagnosis", "tokens": 4096, "step": 1, "time_unix": 1.7e9, "layer": "blocks.1.ffn.down",
    "gemm": "wgrad", "relative_error": 0.16, "gain": 0.98, "bias_share": None, "sketch": "AAAA",
}  # fmt: skip
REPORT = describe.report_link("1", "abc")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ([], "none"),
        (["fprop", "dgrad"], "fprop+dgrad"),
        (True, "true"),
        (0.004, "0.004"),
        ("dht", "dht"),
        ({"a": [1]}, '{"a": [1]}'),
    ],
)
def test_values_as_people_write_them(value, shown):
    assert describe.text(value) == shown


def test_params_are_flat_and_short_and_of_a_foreign_model_its_own(study):
    config = {
        "model": {"width": 128, "odd key?": "x", "function": "my.py:build", "options": {"width": 64}},
        "data": {"paths": ["p" * 400] * 20, "odd key?": "x"},
    }
    params = describe.run_params(config, study.typed_plan().arms[1])
    assert params.pop("data.paths")[-1] == "…"
    assert params == {
        "model.function": "my.py:build", "model.options.width": "64", "data.odd key_": "x",
        "factor.recipe.gemms": "fprop",
    }  # fmt: skip


def test_tags_of_a_run_that_failed_and_forks(study):
    run, fork = LockedRun(id="abc", seed=3), ForkPoint(arm="bf16", tokens=4096)
    arms = (LockedArm(name="bf16", runs=(run,)), LockedArm(name="fp4", runs=(run,), fork=fork))
    plan = LockedPlan(study="s", baseline="bf16", target=Target(kind="val_loss", value=2.0), arms=arms)
    status = Status(state="failed", tokens=12_345, message="CUDA out of memory")
    environment = {"timing_valid": False, "git_commit": "f00", "fingerprints": ["a1", "b2"]}
    base, forked = (describe.run_tags(plan, i, run, status, environment, report=REPORT) for i in (0, 1))
    wanted = {
        "ablate.run_id": "abc", "ablate.arm": "fp4", "ablate.seed": "3", "ablate.state": "failed",
        "ablate.baseline": "false", "ablate.timing_valid": "false", "mlflow.source.git.commit": "f00",
        "ablate.arithmetic": "a1 then b2", "ablate.fork_from": "bf16", "ablate.fork_tokens": "4096",
        "ablate.cost_counted_from_tokens": "4096",
    }  # fmt: skip
    assert wanted.items() <= forked.items()
    assert "Failed after 12,345 tokens. CUDA out of memory" in forked["mlflow.note.content"]
    assert base["ablate.baseline"] == "true"
    assert not any("fork" in key or "counted" in key for key in base)
    assert base["mlflow.runColor"] != forked["mlflow.runColor"]


def test_the_note_shows_the_design_and_stays_within_mlflows_limit(study):
    note = describe.study_note(study.typed_plan(), report=REPORT)
    assert note.startswith("Which GEMM *suffers*?")
    assert "- **Target**: validation loss 2.1 nats per token" in note
    assert "| fprop | Fprop mxfp4; Dgrad+Wgrad bf16 | recipe.gemms: none → fprop | 0, 1 |" in note
    study.plan["arms"] *= 2000
    study.plan["arms"][0]["name"] = study.plan["baseline"] = "a|b"
    note = describe.study_note(study.typed_plan(), report=REPORT)
    assert len(note) < 20_000
    assert r"a\|b" in note


ERROR, GAIN = "relative_error/blocks.1.ffn.down", "gain/blocks.1.ffn.down"


@pytest.mark.parametrize(
    ("row", "found"),
    [
        (TRAIN, {"train_loss": 5.5, "learning_rate": 0.004}),
        *((TRAIN | {"loss": bad}, {"learning_rate": 0.004}) for bad in (math.nan, math.inf, None, "5", True)),
        (
            EVAL | {"val_loss_bf16": 4.9},
            {"val_loss": 5.0, "val_perplexity": math.exp(5.0), "val_loss_bf16": 4.9},
        ),
        (EVAL | {"val_loss": -math.inf}, {}),
        (EVAL | {"val_loss": 800.0}, {"val_loss": 800.0}),  # a perplexity that is no number
        (DIAGNOSIS, {f"diag/wgrad/{ERROR}": 0.16, f"diag/wgrad/{GAIN}": 0.98}),
        (
            DIAGNOSIS | {"what_if": "Fprop+Dgrad bf16; Wgrad mxfp4(even) SR×0.9", "gain": None},
            {f"what_if/Fprop_Dgrad bf16_ Wgrad mxfp4_even_ SR_0.9/wgrad/{ERROR}": 0.16},
        ),
        *(
            (DIAGNOSIS | bad, {})
            for bad in (
                {"what_if": 3}, {"layer": "a b<script>"}, {"layer": None}, {"gemm": "o"}, {"gemm": ["wgrad"]},
            )
        ),
        *((row, {}) for row in (3, [], {"kind": "train"}, TRAIN | {"kind": "o"}, TRAIN | {"kind": ["x"]})),
        (TRAIN | {"kind": "system", "x/../y": 1, "cpu_<b>": 1, "cpu_use": 2}, {"system/cpu_use": 2}),
    ],
)  # fmt: skip
def test_points_of_a_row(row, found):
    assert {point.key: point.value for point in points(row)} == found


def test_a_point_has_the_rows_tokens_and_time_and_names_stay_apart():
    assert points(TRAIN)[0] == Point("train_loss", 5.5, 1_700_000_000_123, 4096)
    long = [points(DIAGNOSIS | {"what_if": "x" * 200 + end})[0].key for end in "ab"]
    assert long[0] != long[1]
    assert len(long[0]) < 150


def test_rows_are_read_in_pieces_and_a_cut_or_foreign_line_stops_nothing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_points(path, 0, 100) == ([], 0)
    append_line(path, TRAIN | {"note": "x" * 500})  # longer than a piece
    first = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"\xff\xfe garbage\n")
    append_line(path, EVAL)
    whole = path.stat().st_size
    with path.open("ab") as file:
        file.write(b'{"kind": "eval", "tok')
    found, offset = read_points(path, 0, 16)
    assert (len(found), offset) == (2, first)
    found, offset = read_points(path, offset, 10_000)
    assert ([point.key for point in found], offset) == (["val_loss", "val_perplexity"], whole)
    assert read_points(path, offset, 10_000) == ([], whole)


def test_the_tail_tells_a_rewound_file(tmp_path):
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


def test_the_view_has_our_order_of_charts_unless_it_is_too_long_for_mlflow(study):
    view = json.loads(describe.view(study.typed_plan()))
    charts = [card["metricKey"] for card in view["compareRunCharts"]]
    assert (charts[0], charts[-1]) == ("val_loss", "learning_rate")
    assert {"params.`factor.recipe.gemms`", "metrics.`token_cost`"} <= set(view["selectedColumns"])
    study.plan["arms"][1]["factors"] = {f"training.field{n}": 1 for n in range(80)}
    long = describe.view(study.typed_plan())
    assert len(long) < 5000
    assert "compareRunCharts" not in long


def test_figures_of_a_report(tmp_path):
    def arm(name, estimates, *tokens, **more):
        runs = [
            {
                "id": f"{name}{seed}",
                "seed": seed,
                "tokens_to_target": one,
                "at_or_before_first_evaluation": one == 5,
            }
            for seed, one in enumerate(tokens)
        ]
        tokens_to_target, token_cost = ({"estimate": one} for one in estimates)
        return {
            "name": name, "counted_from_tokens": 0, "tokens_to_target": tokens_to_target,
            "token_cost": token_cost, "runs": runs, **more,
        }  # fmt: skip

    arms = [
        arm("b", (1000.0, None), 1000.0, None, 5),
        arm("a/c", (1250.0, 0.25), 1250.0, 1500.0, 5),
        arm("forks", (900.0, None), 900.0, counted_from_tokens=10),
    ]
    (tmp_path / "r.json").write_text(json.dumps({"baseline": "b", "arms": arms}))
    found = describe.read_results(tmp_path / "r.json")
    assert found.pop(describe.SUMMARY) == {
        "tokens_to_target/b": 1000.0, "tokens_to_target/a_c": 1250.0, "token_cost/a_c": 0.25,
        "tokens_to_target/forks": 900.0,
    }  # fmt: skip
    assert {run: list(figures.values()) for run, figures in found.items()} == {
        "b0": [1000.0], "b1": [], "b2": [], "a/c0": [1250.0, 0.25], "a/c1": [1500.0], "a/c2": [],
        "forks0": [900.0],
    }  # fmt: skip
    (tmp_path / "r.json").write_text("{")
    assert describe.read_results(tmp_path / "r.json") == {}
