"""What MLflow is shown of a study and of its rows. ``REWRITE=1 pytest`` writes ``shown.json`` anew."""

import json
import math
import os
from pathlib import Path

import pytest

from ablate.base.files import append_line
from ablate.store import Status
from ablate.track import describe
from ablate.track.describe import Point, points, read_points

TRAIN = {"kind": "train", "tokens": 4096, "step": 1, "time_unix": 1.7e9 + 0.1234, "loss": 5.5, "lr": 0.004}
EVAL = {"kind": "eval", "tokens": 8192, "step": 2, "time_unix": 1.7e9, "val_loss": 5.0}
DIAGNOSIS = {
    "kind": "diagnosis", "tokens": 4096, "step": 1, "time_unix": 1.7e9, "layer": "blocks.1.ffn.down",
    "gemm": "wgrad", "relative_error": 0.16, "gain": 0.98, "bias_share": None, "sketch": "AAAA",
}  # fmt: skip
CONFIG = {
    "model": {"width": 128, "odd key?": "x", "function": "my.py:build", "options": {"width": 64}},
    "data": {"paths": ["p" * 400] * 20, "odd key?": "x", "none": [], "map": [{"a": [1]}]},
    "training": {"compile": True, "learning_rate": 0.004},
}


def test_the_design_as_mlflow_shows_it(study):
    fork = {"arm": "bf16", "tokens": 4096}
    study.plan["arms"][1] |= {"name": "a|b", "fork": fork}
    plan = study.write_plan()
    status = Status(state="failed", tokens=12_345, message="CUDA out of memory")
    environment = {"timing_valid": False, "git_commit": "f00", "backend": None, "fingerprints": ["a1", "b2"]}
    shown = {
        "tags": [
            describe.run_tags(plan, i, arm.runs[1], status, environment, report="LINK")
            for i, arm in enumerate(plan.arms)
        ],
        "parameters": describe.run_params(CONFIG, plan.arms[1]),
        "note": describe.study_note(plan, report="LINK").splitlines(),
        "view": json.loads(describe.view(plan)),
    }
    path = Path(__file__).parent / "shown.json"
    if "REWRITE" in os.environ:
        path.write_text(json.dumps(shown, indent=1, ensure_ascii=False) + "\n")
    assert shown == json.loads(path.read_text())


def test_of_a_commands_run_what_is_known_is_shown(study):
    plan = study.write_plan()
    environment = {"backend_mode": "command", "markers": ["FP4 e2m1"]}
    tags = describe.run_tags(plan, 1, plan.arms[1].runs[0], Status(), environment, report="LINK")
    assert "\n\nBy the command, as configured; its output held: FP4 e2m1\n\n" in tags["mlflow.note.content"]
    config = CONFIG | {"trainer": {"command": ["run"]}, "vocab_size": 10**15}
    config["training"] = config["training"] | {"tokens": 4096}
    shown = describe.run_params(config, plan.arms[1])
    read = {"trainer.command": "run", "training.tokens": "4096"}
    assert {name: value for name, value in shown.items() if not name.startswith("factor.")} == read


def test_what_is_too_long_for_mlflow_is_cut(study):
    study.plan["arms"][1]["factors"] = {f"training.field{n}": "x" * 9000 for n in range(80)}
    study.plan["arms"] *= 2000
    plan = study.write_plan()
    assert len(describe.study_note(plan, report="LINK")) < 20_000
    view = describe.view(plan)
    assert len(view) < 5000
    assert "compareRunCharts" not in view
    tags = describe.run_tags(plan, 1, plan.arms[1].runs[0], Status(), {}, report="LINK")
    assert max(map(len, tags.values())) == 5000


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
        (DIAGNOSIS | {"kind": "load", "busiest": 1.5}, {"diag/busiest_expert/blocks.1.ffn.down": 1.5}),
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
