from __future__ import annotations

import pytest
from synthetic_study import line, reseal

from ablate.base.errors import UserError
from ablate.base.files import append_line, record_text
from ablate.results.frames import load_frames
from ablate.store import StudyStore
from ablate.store.leases import Leases
from ablate.store.plan_file import plan_to_json
from tests.golden import rows_of


def first_run(store):
    return store.run(store.plan().arms[0].runs[0].id)


def test_runs_and_evaluations(make_study):
    store = make_study(
        {"a": [line(3, 2), line(3, 1)], "b": [line(4, 3), []]},
        states={("b", 1): "pending"},
    )
    frames = load_frames(store)
    runs = list(frames.runs.values())
    names = [f"{run.arm} {run.seed} {run.status.state}" for run in runs]
    assert names == ["a 0 finished", "a 1 finished", "b 0 finished", "b 1 pending"]
    assert frames.evals["val_loss"].tolist() == [3, 2, 3, 1, 4, 3]
    assert frames.evals["tokens"].tolist() == [100, 200] * 3
    assert [run.tokens_per_sec for run in runs[:3]] == [31000.0] * 3
    assert {run.budget for run in runs} == {1_000_000}
    assert frames.faults == ()
    assert set(frames.configs) == {"a", "b"}


EVAL = {"kind": "eval", "tokens": 300, "step": 3, "val_loss": 1.5}
ODD = """
# Cut by a crash.
{"kind":"eval","tokens":300,"step":3,"val_lo | 3 2
# Of another program, which sealed them.
{"kind":"eval","tokens":; {"kind":"eval","tokens":"many","val_loss":1}; \
{"kind":"eval","tokens":300,"val_loss":NaN}; {"kind":"eval","tokens":300,"val_loss":1.5}; | 3 2 1.5
# After a resume the last of two at the same tokens counts.
{"kind":"eval","tokens":100,"val_loss":2.9}; | 2.9 2
"""


@pytest.mark.parametrize(("lines", "losses"), rows_of(ODD))
def test_odd_rows_are_left_out(make_study, lines, losses):
    store = make_study({"a": [line(3, 2)]})
    run = first_run(store)
    with run.metrics_path.open("a") as file:
        file.write("\n".join(lines.split("; ")).replace(";", "\n"))
    reseal(run)
    expected = [float(loss) for loss in losses.split()]
    assert load_frames(store).evals["val_loss"].tolist() == expected


FILES = (
    "status.json", "config.json", "environment.json", "metrics.jsonl", "diagnostics.jsonl", "attempts/1.json",
)  # fmt: skip


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["digit", "cut", "gone"])
def test_nothing_of_a_damaged_run_is_a_number(make_study, file, damage):
    store = make_study({"a": [line(3, 2), line(3, 1)]})
    run = first_run(store)
    Leases(run.attempts).claim().end("finished")
    run.diagnostics_path.write_text('{"kind": "diagnosis", "tokens": 1}\n')
    reseal(run)
    assert load_frames(store).faults == ()
    path = run.path / file
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[:-2])
    else:
        path.write_bytes(content.replace(b"1", b"7", 1))
    frames = load_frames(store)
    (_, damaged), (other, finished) = frames.runs.items()
    assert (damaged.status.state, finished.status.state) == ("damaged", "finished")
    assert frames.evals["run_id"].tolist() == [other] * 2
    assert run.run_id not in frames.environments
    assert (damaged.status.tokens, finished.status.tokens) == (0, 200)
    (fault,) = frames.faults
    assert fault.startswith(f"{run.path}: {file}")


def test_of_a_run_that_goes_on_a_checkpoint_vouches_for_the_rows(make_study):
    store = make_study({"a": [line(3, 2, 1)]}, states={("a", 0): "running"})
    run = first_run(store)
    append_line(run.metrics_path, EVAL | {"tokens": 400})
    frames = load_frames(store)
    assert (frames.evals["val_loss"].tolist(), frames.faults) == ([3, 2, 1], ())
    run.metrics_path.write_bytes(run.metrics_path.read_bytes().replace(b"2", b"1"))
    frames = load_frames(store)
    assert frames.evals["val_loss"].tolist() == []
    assert "the rows of metrics.jsonl before it are damaged" in frames.faults[0]


def test_a_plan_that_cannot_be_used(make_study, tmp_path):
    with pytest.raises(FileNotFoundError):
        load_frames(StudyStore(tmp_path / "nothing"))
    store = make_study({"a": [line(3, 2)]})
    good = plan_to_json(store.plan())
    odd = (
        {"format": 99},
        {"baseline": "zzz"},
        {"stop": {"hopeless": {"cost_above": 0.1}}},
        {"tuning": {"done": True}},
    )
    for content in (b"{", b"[]", b"", *(record_text(good | change) for change in odd)):
        store.plan_path.write_bytes(content)
        with pytest.raises(UserError, match=r"plan\.lock\.json: not a plan: [^\n]*$"):
            load_frames(store)
