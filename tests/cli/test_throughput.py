"""``ablate throughput``: whole steps of each arm, by turns."""

import json
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from ablate.base.errors import UserError
from ablate.base.files import read_record
from ablate.cli import cli
from ablate.execute import throughput
from ablate.execute.environment import code_digest
from ablate.execute.throughput import measure
from ablate.plan import build_plan
from ablate.run.config import ResourcesConfig
from ablate.store.records import SpeedSettings
from ablate.study import load_study
from ablate.train.throughput import StepTimes

STUDY = """\
name: s
baseline: plain
target: {val_loss: 3.0}
base:
  model: {width: 64, layers: 1, heads: 2, ffn: 96}
  training: {tokens: 65_536, seq_len: 32, batch_size: 8, micro_batch_size: 4}
arms:
  plain: {recipe: bf16}
  fp4: {recipe: {gemms: [fprop, wgrad], stabiliser: sr}}
"""


ONE = SpeedSettings(steps=1, warmup=1, repeats=1)


@pytest.fixture
def study(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text(STUDY)
    return str(path)


@pytest.fixture(autouse=True)
def storage(tmp_path, monkeypatch):
    monkeypatch.setenv("ABLATE_STORAGE", str(tmp_path / "runs"))
    return tmp_path / "runs"


def call(*arguments):
    return CliRunner().invoke(cli, ["throughput", *arguments], catch_exceptions=False, standalone_mode=False)


def test_every_arm_is_timed_and_emulation_is_called_that(study, tmp_path, storage):
    out = tmp_path / "speed.json"
    done = call(study, "--steps", "2", "--repeats", "2", "--device", "cpu", "--out", str(out), "--json")
    content = json.loads(done.stdout)
    assert json.loads(out.read_text()) == content
    plain, fp4 = content["arms"]
    assert [plain["arm"], fp4["arm"]] == ["plain", "fp4"]
    assert all(len(arm["tokens_per_sec"]) == 4 and min(arm["tokens_per_sec"]) > 0 for arm in (plain, fp4))
    assert plain["over_baseline"] == 1.0
    assert fp4["over_baseline"] == pytest.approx(fp4["median"] / plain["median"])
    assert (fp4["timing_valid"], fp4["why_not"]) == (False, "emulated arithmetic")
    assert content["settings"] == {"steps": 2, "warmup": 3, "repeats": 2}
    assert content["versions"]["torch"]
    assert plain["threads"] == 1  # as a run of the arm has
    assert "Kept for the report in" in done.stderr
    assert read_record(storage / "s" / "throughput.json") == content
    planned = {arm.name: arm.runs[0].id for arm in build_plan(load_study(study)).arms}
    assert {arm["arm"]: arm["run"] for arm in content["arms"]} == planned
    assert content["code"] == code_digest()


QUICK = ("--steps", "1", "--warmup", "1", "--repeats", "1", "--device", "cpu")


def test_the_record_is_one_measurement_as_a_whole(study, storage, tmp_path):
    path = storage / "s" / "throughput.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")  # what is damaged is replaced as well
    text = call(study, *QUICK, "--arm", "fp4").stdout
    assert "emulated arithmetic" in text
    assert "Not kept for the report, which needs the baseline timed, too: --arm 'plain'" in text
    assert path.read_text() == "{"
    assert f"Kept for the report in {path}" in call(study, *QUICK, "--arm", "plain").stdout
    assert [arm["arm"] for arm in json.loads(path.read_text())["arms"]] == ["plain"]
    assert [entry.name for entry in path.parent.iterdir()] == ["throughput.json"]
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "throughput.json").mkdir()
    with pytest.raises(UserError, match=r"cannot write .*throughput\.json"):
        call(study, *QUICK, "--arm", "plain", "--storage", str(tmp_path))
    with pytest.raises(UserError, match="no arm 'x' in study 's'"):
        call(study, "--arm", "x")


@pytest.fixture
def two_arms(monkeypatch):
    """Arms whose times are made up: the clock slows down by and by."""
    taken = []

    def times(config, **settings):
        taken.append(config)
        sec = (1.0 if config == "slow" else 0.5) * (1 + 0.1 * len(taken))
        return StepTimes(sec_per_step=(sec,) * settings["repeats"], tokens_per_step=100, peak_memory_bytes=7)

    monkeypatch.setattr(throughput, "time_steps", times)
    monkeypatch.setattr(throughput, "fit_choices", lambda *_: ())
    monkeypatch.setattr(throughput, "overall_mode", lambda _: "native")
    arms = [
        SimpleNamespace(
            name=name,
            config=SimpleNamespace(with_seed=lambda _, name=name: name),
            runs=[SimpleNamespace(seed=0, id="0123")],
            resources=ResourcesConfig(cpus=1),
        )
        for name in ("slow", "fast")
    ]
    return arms, taken


@pytest.mark.parametrize("others", [None, "the GPU is 40 % busy"])
def test_there_and_back_and_alone(two_arms, others, monkeypatch):
    monkeypatch.setattr(throughput, "other_work", lambda _: others)
    arms, taken = two_arms
    (slow, fast), seen = measure(arms, "slow", "cpu", settings=ONE)
    assert taken == ["slow", "fast", "fast", "slow"]
    assert seen == others
    assert slow.over_baseline == 1.0
    assert fast.over_baseline == pytest.approx(2.0, rel=0.02)  # the drift has cancelled
    assert fast.peak_memory_bytes == 7
    assert (fast.timing_valid, fast.why_not) == (others is None, others)


def test_work_that_came_later_counts_as_well(two_arms, monkeypatch):
    looks = iter([None, "the GPU is 40 % busy"])
    monkeypatch.setattr(throughput, "other_work", lambda _: next(looks))
    (slow, _), seen = measure(two_arms[0], "slow", "cpu", settings=ONE)
    assert (slow.why_not, seen) == ("the GPU is 40 % busy",) * 2


def test_what_cannot_run_is_one_line(two_arms, monkeypatch):
    def refuse(*_args, **_settings):
        raise ValueError("the group of 32 does not divide 20")

    monkeypatch.setattr(throughput, "time_steps", refuse)
    monkeypatch.setattr(throughput, "other_work", lambda _: None)
    with pytest.raises(UserError, match="arm 'slow': the group of 32 does not divide 20"):
        measure(two_arms[0], "slow", "cpu", settings=ONE)


def test_several_devices_a_run_are_one_line(study, tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text(STUDY.replace("arms:\n", "  resources: {devices_per_run: 2}\narms:\n"))
    with pytest.raises(UserError, match="arm 'plain' trains on 2 devices a run, and this times one"):
        call(study, "--device", "cpu")
