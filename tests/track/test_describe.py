"""What MLflow is shown of a study and of its rows. ``REWRITE=1 pytest`` writes ``shown.json`` anew."""

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest

from ablate.base.files import append_line
from ablate.store import Status
from ablate.track import describe
from ablate.track.describe import points, read_points
from tests.golden import cases, check, check_text

HERE = Path(__file__).parent
EVAL = {"kind": "eval", "tokens": 8192, "step": 2, "time_unix": 1.7e9, "val_loss": 5.0}


def test_the_design_as_mlflow_shows_it(study, make_config):
    fork = {"arm": "bf16", "tokens": 4096}
    study.plan["arms"][1] |= {"name": "a|b<script>", "fork": fork}
    plan = study.write_plan()
    status = Status(state="failed", tokens=12_345, message="CUDA out of memory")
    given = json.loads((HERE / "given.json").read_text())
    arm = plan.arms[0]
    runs = (replace(arm.runs[0], seed=12),)
    names = "all three", "+ RHT", "all three + sr", "aaaaaaaaaaa", "aaaaaaaaaab"
    many = replace(
        plan, arms=tuple(replace(arm, name=name, runs=runs) for name in names)
    )
    tags = partial(describe.run_tags, plan, report="LINK")
    shown = {
        "names": [describe.run_name(many, *pair) for pair in many.runs()],
        "parameters that are set": describe.run_params(
            asdict(make_config(model={"width": 32})), plan, plan.arms[1]
        ),
        "tags": [
            tags(arm, arm.runs[1], status, given["environment"]) for arm in plan.arms
        ],
        "parameters": describe.run_params(given["config"], plan, plan.arms[1]),
        "of a command": {
            "tags": tags(
                plan.arms[1], plan.arms[1].runs[0], Status(), given["its environment"]
            ),
            "parameters": describe.run_params(
                given["config of a command"], plan, plan.arms[1]
            ),
        },
        "note": describe.study_note(plan, report="LINK").splitlines(),
        "view": json.loads(describe.view(plan)),
    }
    text = json.dumps(shown, indent=1, ensure_ascii=False)
    check_text(HERE / "shown.json", f"{text}\n")


def test_what_is_too_long_for_mlflow_is_cut(study):
    values = {f"training.field{n}": "x" * 9000 for n in range(80)}
    differs = {key: [None, value] for key, value in values.items()}
    long = {"factors": values, "differs": differs}
    arms = study.plan["arms"]
    study.plan["arms"] = [arm | long for arm in arms] + arms * 500
    plan = study.write_plan()
    assert len(describe.study_note(plan, report="LINK")) < 20_000
    view = describe.view(plan)
    assert len(view) < 5000
    assert "compareRunCharts" not in view
    tags = describe.run_tags(
        plan, plan.arms[1], plan.arms[1].runs[0], Status(), {}, report="LINK"
    )
    assert max(map(len, tags.values())) == 5000


@pytest.mark.parametrize("case", cases(HERE / "points.txt"))
def test_points_of_a_row(case):
    shown = []
    for line in case[2].strip().splitlines():
        for key, value, timestamp_ms, step in points(json.loads(line)):
            shown.append(f"{key} {value:.6g} at {timestamp_ms} ms, {step}")
    check(case, shown)


def test_rows_are_read_in_pieces_and_a_cut_or_foreign_line_stops_nothing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_points(path, 0, 100) == ([], 0)
    append_line(path, EVAL | {"note": "x" * 500})  # longer than a piece
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
    assert [point.key for point in read] == ["val_loss", "val_perplexity"]
    assert offset == whole
    assert read_points(path, offset, 10_000) == ([], whole)
    in_bits, _ = read_points(path, first, 10_000, "bits")
    assert [point.key for point in in_bits] == ["val_loss"]
