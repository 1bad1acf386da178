"""``ablate check steps``: whole steps of each arm, by turns."""

import json
from types import SimpleNamespace

import pytest

from ablate.base.errors import UserError
from ablate.base.files import read_record
from ablate.execute import throughput
from ablate.execute.throughput import measure
from ablate.run.config import ResourcesConfig
from ablate.store.records import SpeedSettings
from ablate.train.probe import StepTimes
from tests.cli.command import ablate

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


@pytest.fixture
def call(tmp_path):
    (tmp_path / "s.yaml").write_text(STUDY)
    steps = "check steps s.yaml --device cpu --steps"
    return lambda words: ablate(f"{steps} {words}", cwd=tmp_path)


def test_every_arm_is_timed_and_emulation_is_called_that(call, tmp_path):
    done = call("2 --repeats 2 --out speed.json --json")
    content = json.loads(done.out)
    assert json.loads((tmp_path / "speed.json").read_text()) == content
    assert read_record(tmp_path / "runs/s/throughput.json") == content
    assert "Kept for the report in" in done.err
    plain, fp4 = content["arms"]
    for arm in (plain, fp4):
        assert len(arm["tokens_per_sec"]) == 4
        assert min(arm["tokens_per_sec"]) > 0
    assert (fp4["timing_valid"], fp4["why_not"]) == (False, "emulated arithmetic")
    assert content["settings"] == {"steps": 2, "warmup": 3, "repeats": 2}
    assert plain["threads"] == 1  # as a run of the arm has


def test_the_record_is_one_measurement_as_a_whole(call, tmp_path):
    path = tmp_path / "runs/s/throughput.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")  # what is damaged is replaced as well
    shown = call("1 --repeats 1 --arm fp4").out
    assert "emulated arithmetic" in shown
    assert (
        "Not kept for the report, which needs the baseline timed, too: --arm 'plain'"
        in shown
    )
    assert path.read_text() == "{"
    plain = "1 --repeats 1 --arm plain"
    assert "Kept for the report in runs/s/throughput.json" in call(plain).out
    assert [arm["arm"] for arm in json.loads(path.read_text())["arms"]] == ["plain"]
    assert [*path.parent.iterdir()] == [path]
    path.unlink()
    path.mkdir()
    assert "cannot write runs/s/throughput.json" in call(plain).line


@pytest.fixture
def two_arms(monkeypatch):
    """Return a function that measures two arms whose times are made up: the clock slows down by and by."""
    taken = []

    def times(config, **settings):
        taken.append(config)
        sec = (1.0 if config == "slow" else 0.5) * (1 + 0.1 * len(taken))
        return StepTimes(
            sec_per_step=(sec,) * settings["repeats"],
            tokens_per_step=100,
            peak_memory_bytes=7,
            launch="eager",
        )

    monkeypatch.setattr(throughput, "time_steps", times)
    monkeypatch.setattr(throughput, "fit_choices", lambda *_: ())
    monkeypatch.setattr(throughput, "overall_mode", lambda _: "native")
    arms = [
        SimpleNamespace(
            name=name,
            config=SimpleNamespace(with_seed=lambda _, name=name: name, trainer=None),
            runs=[SimpleNamespace(seed=0, id="0123")],
            resources=ResourcesConfig(cpus=1),
        )
        for name in ("slow", "fast")
    ]

    def call(*looks):
        seen = iter(looks)
        monkeypatch.setattr(throughput, "other_work", lambda _: next(seen))
        settings = SpeedSettings(steps=1, warmup=1, repeats=1)
        return measure("s", arms, "slow", "cpu", settings=settings), taken

    return call


BUSY = "the GPU is 40 % busy"


@pytest.mark.parametrize(
    ("looks", "others"), [((None, None), None), ((BUSY,), BUSY), ((None, BUSY), BUSY)]
)
def test_there_and_back_and_alone(two_arms, looks, others):
    record, taken = two_arms(*looks)
    slow, fast = record.arms
    assert taken == ["slow", "fast", "fast", "slow"]
    assert record.other_work == others
    assert slow.over_baseline == 1.0
    assert fast.over_baseline == pytest.approx(2.0, rel=0.02)  # the drift has cancelled
    assert fast.peak_memory_bytes == 7
    assert (fast.timing_valid, fast.why_not) == (others is None, others)


def test_what_cannot_run_is_one_line(two_arms, monkeypatch):
    def refuse(*_args, **_settings):
        raise ValueError("the group of 32 does not divide 20")

    monkeypatch.setattr(throughput, "time_steps", refuse)
    with pytest.raises(
        UserError, match="arm 'slow': the group of 32 does not divide 20"
    ):
        two_arms(None)
