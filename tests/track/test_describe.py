"""What MLflow is shown of a study and of its rows. ``REWRITE=1 pytest`` writes ``shown.json`` anew."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ablate.base.files import append_line
from ablate.store import Status
from ablate.track import describe
from ablate.track.describe import points, read_points
from tests.golden import cases, check, check_text

HERE = Path(__file__).parent
TRAIN = {
    "kind": "train",
    "tokens": 4096,
    "step": 1,
    "time_unix": 1.7e9,
    "loss": 5.5,
    "lr": 0.004,
}
EVAL = {"kind": "eval", "tokens": 8192, "step": 2, "time_unix": 1.7e9, "val_loss": 5.0}
CONFIG = {
    "model": {
        "width": 128,
        "odd key?": "x",
        "function": "my.py:build",
        "options": {"width": 64},
    },
    "data": {
        "paths": ["p" * 400] * 20,
        "odd key?": "x",
        "none": [],
        "map": [{"a": [1]}],
    },
    "training": {"compile": True, "learning_rate": 0.004},
}


def test_the_design_as_mlflow_shows_it(study, make_config):
    fork = {"arm": "bf16", "tokens": 4096}
    study.plan["arms"][1] |= {"name": "a|b<script>", "fork": fork}
    plan = study.write_plan()
    status = Status(state="failed", tokens=12_345, message="CUDA out of memory")
    environment = {"git_commit": "f00", "backend": None, "fingerprints": ["a1", "b2"]}
    command = CONFIG | {"trainer": {"command": ["run"]}, "vocab_size": 10**15}
    command["training"] = command["training"] | {"tokens": 4096}
    by_command = {
        "backend_mode": "command",
        "command": "cd here && ./train",
        "code_commit": "c0ffee",
        "code": "d1",
        "markers": ["FP4 e2m1"],
    }
    named = []
    for name in ("all three", "+ RHT", "all three + sr", "aaaaaaaaaaa", "aaaaaaaaaab"):
        arm = plan.arms[0]
        named.append(replace(arm, name=name, runs=(replace(arm.runs[0], seed=12),)))
    many = replace(plan, arms=tuple(named))
    shown = {
        "names": [describe.run_name(many, arm, arm.runs[0]) for arm in named],
        "parameters that are set": describe.run_params(
            asdict(make_config(model={"width": 32})), plan, plan.arms[1]
        ),
        "tags": [
            describe.run_tags(plan, i, arm.runs[1], status, environment, report="LINK")
            for i, arm in enumerate(plan.arms)
        ],
        "parameters": describe.run_params(CONFIG, plan, plan.arms[1]),
        "of a command": {
            "tags": describe.run_tags(
                plan, 1, plan.arms[1].runs[0], Status(), by_command, report="LINK"
            ),
            "parameters": describe.run_params(command, plan, plan.arms[1]),
        },
        "note": describe.study_note(plan, report="LINK").splitlines(),
        "view": json.loads(describe.view(plan)),
    }
    check_text(
        HERE / "shown.json", json.dumps(shown, indent=1, ensure_ascii=False) + "\n"
    )


def test_what_is_too_long_for_mlflow_is_cut(study):
    values = {f"training.field{n}": "x" * 9000 for n in range(80)}
    differs = {key: [None, value] for key, value in values.items()}
    long = {"factors": values, "differs": differs}
    study.plan["arms"] = [{**arm, **long} for arm in study.plan["arms"]] + study.plan[
        "arms"
    ] * 500
    plan = study.write_plan()
    assert len(describe.study_note(plan, report="LINK")) < 20_000
    view = describe.view(plan)
    assert len(view) < 5000
    assert "compareRunCharts" not in view
    tags = describe.run_tags(plan, 1, plan.arms[1].runs[0], Status(), {}, report="LINK")
    assert max(map(len, tags.values())) == 5000


@pytest.mark.parametrize("case", cases(HERE / "points.txt"))
def test_points_of_a_row(case):
    rows = map(json.loads, case[2].strip().splitlines())
    shown = [point for row in rows for point in points(row)]
    check(
        case,
        [
            f"{point.key} {point.value:.6g} at {point.timestamp_ms} ms, {point.step}"
            for point in shown
        ],
    )


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
    read, offset = read_points(path, 0, 16)
    assert (len(read), offset) == (2, first)
    read, offset = read_points(path, offset, 10_000)
    assert ([point.key for point in read], offset) == (
        ["val_loss", "val_perplexity"],
        whole,
    )
    assert read_points(path, offset, 10_000) == ([], whole)
    in_bits, _ = read_points(path, first, 10_000, "bits")
    assert [point.key for point in in_bits] == ["val_loss"]
