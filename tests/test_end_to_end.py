"""The main job through the command line, with real parts: Ray, training on real text, MLflow, report."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

STUDY = """\
name: small
baseline: bf16
target: {val_loss: 3.5}
seeds: 2
base:
  model: {width: 64, layers: 1, heads: 2, ffn: 96}
  data: {source: stdlib, tokenizer: bytes, max_bytes: 1_000_000}
  training:
    tokens: 32_768
    seq_len: 64
    batch_size: 16
    warmup_tokens: 2048
    eval_every_tokens: 4096
    eval_tokens: 4096
arms:
  bf16: {recipe: bf16}
  all three: {recipe: {gemms: [fprop, dgrad, wgrad], stabiliser: sr+rht}}
"""


def ablate(folder, *arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "ablate", *arguments], cwd=folder, capture_output=True, text=True, check=False,
        env=os.environ | {"ABLATE_STORAGE": "runs"}, **options,
    )  # fmt: skip


def evaluations(folder):
    """Map every run's id to its validation losses."""
    losses = {}
    for path in sorted(folder.glob("runs/small/runs/*/metrics.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        losses[path.parent.name] = [row["val_loss"] for row in rows if row["kind"] == "eval"]
    return losses


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    (folder / "small.yaml").write_text(STUDY)
    done = ablate(folder, "run", "small.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done


def test_one_command_from_study_file_to_report(finished):
    folder, done = finished
    assert "4 to run" in done.stdout
    assert "Report:" in done.stdout
    report = json.loads((folder / "runs/small/report/report.json").read_text())
    assert report["study"] == "small"
    assert report["target"].items() >= {"kind": "val_loss", "value": 3.5, "crossing": "confirmed"}.items()
    arms = {arm["name"]: arm for arm in report["arms"]}
    assert [arm["n"] for arm in arms.values()] == [2, 2]
    assert arms["bf16"]["hit"] == 2
    assert arms["bf16"]["tokens_to_target"]["estimate"] > 0
    html = (folder / "runs/small/report/report.html").read_text()
    assert "<svg" in html
    assert (folder / "runs/mlflow.db").exists()


def test_the_same_command_again_runs_nothing(finished):
    folder, _ = finished
    before = {path: path.stat().st_mtime_ns for path in folder.glob("runs/small/runs/*/metrics.jsonl")}
    again = ablate(folder, "run", "small.yaml")
    assert again.returncode == 0
    assert "0 to run, 4 of those asked for have ended before" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_another_study_takes_the_runs_that_are_its_own_too(finished):
    folder, _ = finished
    named = STUDY.replace("name: small", "name: other").replace("  all three:", "  by another name:")
    (folder / "other.yaml").write_text(named.replace("seeds: 2", "seeds: [1]"))
    planned = ablate(folder, "plan", "other.yaml").stdout
    assert "2 taken from small: same configuration, same code" in planned
    assert "2 (2 done)" in planned
    as_json = json.loads(ablate(folder, "plan", "other.yaml", "--json").stdout)
    ids = {run["id"] for arm in as_json["arms"] for run in arm["runs"]}
    assert as_json["taken_from"] == dict.fromkeys(ids, "small")
    assert not (folder / "runs/other").exists()
    done = ablate(folder, "run", "other.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 to run, 0 of those asked for have ended before, 2 taken from small" in done.stdout
    report = json.loads((folder / "runs/other/report/report.json").read_text())
    assert [(arm["name"], arm["n"]) for arm in report["arms"]] == [("bf16", 1), ("by another name", 1)]
    for path in folder.glob("runs/other/runs/*/metrics.jsonl"):
        assert path.read_bytes() == (folder / "runs/small/runs" / path.parent.name / path.name).read_bytes()
    assert "0 to run, 2 of those asked for have ended before." in ablate(folder, "run", "other.yaml").stdout


def test_status_tells_machines_and_people(finished):
    folder, _ = finished
    answer = json.loads(ablate(folder, "status", "small", "--json").stdout)
    assert answer["states"] == {"finished": 4}
    assert answer["running"] is False
    assert {run["tokens"] for run in answer["runs"]} == {32_768}
    assert "4 of 4 done" in ablate(folder, "status", "small.yaml").stdout


def test_mlflow_holds_the_curves_over_tokens(finished):
    folder, _ = finished
    code = """
import json, mlflow
client = mlflow.MlflowClient("sqlite:///runs/mlflow.db")
experiment = client.get_experiment_by_name("small")
runs = client.search_runs([experiment.experiment_id], "tags.`ablate.arm` != ''")
history = {}
for run in runs:
    points = client.get_metric_history(run.info.run_id, "val_loss")
    history[run.info.run_name] = sorted((point.step, point.value) for point in points)
print(json.dumps(history))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    history = json.loads(done.stdout.splitlines()[-1])
    assert set(history) == {f"{arm} seed {seed}" for arm in ("bf16", "all three") for seed in (0, 1)}
    for curve in history.values():
        assert [step for step, _ in curve] == list(range(4096, 32_769, 4096))
    values = [[value for _, value in curve] for curve in history.values()]
    assert sorted(values) == sorted(evaluations(folder).values())


def test_the_speed_of_emulation_is_measured_and_makes_no_speed_up(finished):
    folder, _ = finished
    quick = ("--steps", "1", "--warmup", "1", "--repeats", "1", "--device", "cpu")
    timed = ablate(folder, "throughput", "small.yaml", *quick)
    assert timed.returncode == 0, timed.stdout + timed.stderr
    record = json.loads((folder / "runs/small/throughput.json").read_text())
    assert all(min(arm["tokens_per_sec"]) > 0 for arm in record["arms"])
    report = json.loads(ablate(folder, "report", "small", "--json").stdout)
    assert report["throughput"]["not_used"] == dict.fromkeys(("bf16", "all three"), "emulated arithmetic")
    assert report["timing_reasons"][0] == {"reason": "emulated arithmetic", "runs": 4}
    assert [arm["measured"] for arm in report["arms"]] == [None, None]
    assert any(
        "gives no speed-up: emulated arithmetic (bf16, all three)." in one for one in report["warnings"]
    )
    # It is of what the runs are: by a native device's word for it, configuration, code and device would do.
    ids = {arm["name"]: {run["id"] for run in arm["runs"]} for arm in report["arms"]}
    assert all(arm["run"] in ids[arm["arm"]] for arm in record["arms"])
    codes = {environment["environment"]["code"] for environment in report["environments"]}
    assert codes == {record["code"]}
    assert record["device"]["name"] == "CPU"


def test_interrupted_and_resumed_ends_with_the_same_bits(finished, tmp_path):
    (tmp_path / "small.yaml").write_text(STUDY)
    process = subprocess.Popen(
        [sys.executable, "-m", "ablate", "run", "small.yaml"], cwd=tmp_path, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, env=os.environ | {"ABLATE_STORAGE": "runs"},
    )  # fmt: skip
    give_up = time.monotonic() + 120
    while not any(evaluations(tmp_path).values()) and time.monotonic() < give_up:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 130, output
    assert "go on with: ablate run small.yaml" in output
    states = json.loads(ablate(tmp_path, "status", "small", "--json").stdout)["states"]
    assert states.get("finished", 0) < 4, "the interrupt came too late to test anything"
    resumed = ablate(tmp_path, "run", "small.yaml")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert evaluations(tmp_path) == evaluations(finished[0])


def test_killed_and_taken_up_by_two_at_once_it_ends_with_the_same_bits(finished, tmp_path):
    text = STUDY.replace("  training:", "  resources: {checkpoint_every_sec: 0}\n  training:")
    (tmp_path / "small.yaml").write_text(text)
    command = [sys.executable, "-m", "ablate", "run", "small.yaml"]
    environment = os.environ | {"ABLATE_STORAGE": "runs"}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    give_up = time.monotonic() + 120
    while not list(tmp_path.glob("runs/small/runs/*/checkpoints/*.json")) and time.monotonic() < give_up:
        time.sleep(0.02)
    process.kill()
    process.wait()
    both = [
        subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [each.communicate(timeout=200)[0] for each in both]
    assert [each.returncode for each in both] == [0, 0], outputs
    assert any("its runs are shared" in output for output in outputs)
    assert evaluations(tmp_path) == evaluations(finished[0])
    ledgers = [json.loads(path.read_text()) for path in tmp_path.glob("runs/small/runs/*/attempts/*.json")]
    assert sum(record["outcome"] == "finished" for record in ledgers) == 4
    assert any(record["resumed_from_step"] for record in ledgers)
    ends = {path.read_text() for path in tmp_path.glob("runs/small/report/report.json")}
    assert json.loads(ends.pop())["runs_missing"] == 0


def test_a_part_of_a_study(finished, tmp_path):
    (tmp_path / "small.yaml").write_text(STUDY)
    part = ablate(tmp_path, "run", "small.yaml", "--only", "bf16", "--seeds", "1")
    assert part.returncode == 0, part.stdout + part.stderr
    assert "1 to run" in part.stdout
    done = evaluations(tmp_path)
    assert len(done) == 1
    assert done.items() <= evaluations(finished[0]).items()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["run", "small.yaml", "--only", "bf61"],
            "--only: no arm 'bf61' in study 'small' (did you mean 'bf16'?)",
        ),
        (["run", "small.yaml", "--seeds", "7"], "--seeds: 7 is not a seed of study 'small' (seeds: 0, 1)"),
        (["run", "small.yaml", "--seeds", "x"], "--seeds: 'x' is no list of seeds (expected such as 0,1,4)"),
        (["run", "smal.yaml"], "smal.yaml"),
        (["status", "nothing"], "no study 'nothing' in runs"),
        (["rum", "small.yaml"], "no command 'rum' (did you mean 'run'?)"),
        (["run"], "ablate run: Missing argument 'STUDY'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, arguments, message):
    (tmp_path / "small.yaml").write_text(STUDY)
    done = ablate(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
