"""Runs that begin with the state of another: through the run store, killed, and without one."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from kill import data, execute_and_die_at, in_child, tiny_config, wait_for

from ablate.data import prepare
from ablate.execute.driver import execute_study
from ablate.execute.pending_runs import RunRequest, copy_results
from ablate.execute.prefixes import Prefixes
from ablate.execute.worker import RunTask, execute_run
from ablate.recipes import Recipe, RecipeSpec, resolve
from ablate.run.config import Fork, ResourcesConfig
from ablate.run.diagnostics import Diagnostics
from ablate.run.ids import run_id
from ablate.store import Status, StudyStore

pytestmark = pytest.mark.xdist_group("ray")

FORK = 5
STEP = 64


def request(arm, config):
    resources = ResourcesConfig(checkpoint_every_sec=0.0)
    return RunRequest(run_id=run_id(config), arm=arm, config=config, tokens_dir=None, resources=resources)


@pytest.fixture
def arms():
    """A whole run in bf16, one that forks from it after five of eight steps, and one with a phase there."""
    base = replace(tiny_config(0), recipe=Recipe())
    fp4 = tiny_config(0).recipe
    late = resolve(RecipeSpec(phases=[{"from_tokens": FORK * STEP, "recipe": "mxfp4"}]))
    fork = Fork(tokens=FORK * STEP, recipe=base.recipe, training=base.training)
    configs = {
        "bf16": base,
        "forked": replace(base, recipe=fp4, fork=fork),
        "late": replace(base, recipe=late),
    }
    return {name: request(name, config) for name, config in configs.items()}


@pytest.fixture
def storage(tmp_path_factory):
    return tmp_path_factory.mktemp("storage")


class Here:
    """A store with these runs, executed one by one without Ray."""

    def __init__(self, storage, name, runs):
        self.storage, self.store, self.runs = storage, StudyStore(storage / name), runs
        for run in runs:
            self.store.run(run.run_id).create(asdict(run.config))
        self.tokens = prepare(data(), storage / "tokens").folder

    def task(self, run, prefixes=None):
        prefixes = prefixes or Prefixes(self.store, self.runs)
        return RunTask(
            **vars(run) | {"tokens_dir": self.tokens}, run_dir=self.store.run(run.run_id).path.resolve(),
            stop_path=self.storage / "stop", device="cpu", git_commit=None,
            prefix=prefixes.of(run.run_id), prefixes=prefixes.kept(run.run_id),
        )  # fmt: skip

    def execute(self, run, prefixes=None):
        end = execute_run(self.task(run, prefixes))
        assert end.state == "finished", end
        return self.rows(run)

    def rows(self, run):
        changing = ("time_unix", "tokens_per_sec")
        rows = map(json.loads, self.store.run(run.run_id).metrics_path.read_text().splitlines())
        return [{key: value for key, value in row.items() if key not in changing} for row in rows]

    def began_at(self, run):
        attempt = self.store.run(run.run_id).attempts / "1.json"
        return json.loads(attempt.read_text())["resumed_from_step"]


def test_prefixes_give_the_rows_of_whole_runs_and_are_trained_once(storage, arms):
    apart = {name: Here(storage, f"{name} alone", [run]).execute(run) for name, run in arms.items()}
    here = Here(storage, "together", list(arms.values()))
    prefixes = Prefixes(here.store, here.runs)
    ids = {name: run.run_id for name, run in arms.items()}
    assert prefixes.waits_for(ids["bf16"]) is None
    assert prefixes.waits_for(ids["forked"]) == prefixes.waits_for(ids["late"]) == ids["bf16"]
    for name, run in arms.items():
        assert here.execute(run, prefixes) == apart[name]
        assert here.began_at(run) == (0 if name == "bf16" else FORK - 1)
        assert prefixes.waits_for(run.run_id) is None
        assert here.store.run(run.run_id).state() == "finished"
    assert apart["forked"] != apart["bf16"]
    (kept,) = here.store.prefixes.iterdir()
    prefixes.clean()
    assert not kept.parent.exists()


def test_diagnosed_runs_share_nothing(storage, arms):
    runs = [replace(run, diagnostics=Diagnostics()) for run in arms.values()]
    prefixes = Prefixes(StudyStore(storage / "study"), runs)
    assert [prefixes.of(run.run_id) for run in runs] == [None, None, None]


def test_what_is_still_to_come_keeps_its_prefix(storage, arms):
    here = Here(storage, "study", [arms["bf16"]])
    later = (arms["forked"].run_id, arms["forked"].config, arms["forked"].resources)
    prefixes = Prefixes(here.store, here.runs, [later])
    here.execute(arms["bf16"], prefixes)
    prefixes.clean()
    assert here.store.prefixes.exists()
    here = Here(storage, "study", [arms["forked"]])
    prefixes = Prefixes(
        here.store, here.runs, [(one.run_id, one.config, one.resources) for one in arms.values()]
    )
    here.execute(arms["forked"], prefixes)
    assert here.began_at(arms["forked"]) == FORK - 1


def test_with_another_code_nothing_is_taken(storage, arms, monkeypatch):
    here = Here(storage, "study", [arms["bf16"], arms["forked"]])
    here.execute(arms["bf16"])
    monkeypatch.setattr("ablate.execute.prefixes.code_digest", lambda: "other")
    here.runs = [arms["forked"]]
    here.execute(arms["forked"])
    assert here.began_at(arms["forked"]) == 0


@pytest.mark.parametrize("part", ["metrics.jsonl", "safetensors", ".json"])
def test_a_damaged_prefix_is_trained_again(storage, arms, part):
    whole = Here(storage, "alone", [arms["forked"]]).execute(arms["forked"])
    here = Here(storage, "study", [arms["bf16"], arms["forked"]])
    prefixes = Prefixes(here.store, here.runs)
    here.execute(arms["bf16"], prefixes)
    (damaged,) = (path for path in here.store.prefixes.rglob(f"*{part}") if path.is_file())
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    assert here.execute(arms["forked"], prefixes) == whole
    assert here.began_at(arms["forked"]) == 0
    assert "prefix " in here.store.run(arms["forked"].run_id).attempt_log(1).read_text()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["bf16", "forked"])
def test_killed_at_any_operation_it_ends_with_the_same_rows(storage, arms, name):
    """Each fourth operation on a file: those of the prefix are among them."""
    runs = [arms["bf16"], arms["forked"]]
    whole = {name: Here(storage, f"{name} alone", [run]).execute(run) for name, run in arms.items()}
    kills = 0
    for operation in range(3, 400, 4):
        here = Here(storage, f"study {operation}", runs)
        if name == "forked":
            here.execute(arms["bf16"])
        prefixes = Prefixes(here.store, runs)
        killed = wait_for(in_child(execute_and_die_at(here.task(arms[name], prefixes), operation)))
        if killed == 0:
            break
        kills += 1
        assert here.execute(arms[name]) == whole[name]
        if name == "bf16":
            assert here.execute(arms["forked"]) == whole["forked"]
            assert here.began_at(arms["forked"]) == FORK - 1
    assert kills > 5


def test_a_fork_of_what_has_diverged_or_failed_does_not_begin(storage, arms):
    here = Here(storage, "study", [arms["forked"]])
    parent = here.store.run(arms["bf16"].run_id)
    parent.path.mkdir(parents=True)

    def reason():
        return Prefixes(here.store, here.runs).why_it_cannot_begin(arms["forked"].run_id)

    assert reason() is None
    parent.write_status(Status(state="diverged", step=3, tokens=3 * STEP, message="non-finite training loss"))
    assert reason() == (
        f"the run that it forks from, {parent.run_id}, diverged before the fork: non-finite training loss"
    )
    parent.write_status(Status(state="diverged", step=7, tokens=7 * STEP))
    assert reason() is None  # after the fork: it trains the common steps itself
    parent.write_status(Status(state="failed", message="out of memory"))
    assert reason() is None  # alone it does not wait for it
    here.runs.insert(0, arms["bf16"])
    assert reason() == f"the run that it forks from, {parent.run_id}, failed before the fork: out of memory"


def test_a_run_past_the_place_holds_nothing_for_others(storage, arms):
    here = Here(storage, "study", [arms["bf16"], arms["forked"]])
    folder = here.store.run(arms["bf16"].run_id).checkpoints
    folder.mkdir()
    for step, holder in ((FORK - 2, arms["bf16"].run_id), (FORK - 1, None)):
        (folder / f"{step:012d}.json").touch()
        assert Prefixes(here.store, here.runs).waits_for(arms["forked"].run_id) == holder


def test_a_run_carries_the_arithmetic_of_the_steps_that_it_begins_with(storage, arms, monkeypatch):
    here = Here(storage, "study", [arms["bf16"], arms["forked"]])
    prefixes = Prefixes(here.store, here.runs)
    with monkeypatch.context() as patch:
        patch.setattr("ablate.execute.fingerprint.fingerprint", lambda _device: "another")
        here.execute(arms["bf16"], prefixes)
    here.execute(arms["forked"], prefixes)
    run = here.store.run(arms["forked"].run_id)
    first, own = run.environment()["fingerprints"]
    assert first == "another" != own
    there = StudyStore(storage / "there")
    wanted = replace(arms["forked"], resources=ResourcesConfig())
    assert copy_results(there, [wanted]) == {}  # nor is it taken as a result of this arithmetic


@pytest.mark.usefixtures("local_ray")
def test_an_execution_trains_common_steps_once_and_leaves_nothing_behind(storage, arms):
    here = Here(storage, "study", list(arms.values()))
    runs = [replace(run, tokens_dir=here.tokens) for run in here.runs]
    end = execute_study(here.store, [runs[1], runs[0], runs[2]])
    assert set(end.states.values()) == {"finished"}
    began = {name: here.began_at(run) for name, run in arms.items()}
    assert sorted(began.values()) == [0, FORK - 1, FORK - 1]
    assert began["forked"] == 0  # the first in order
    assert not here.store.prefixes.exists()
    apart = {name: Here(storage, f"{name} alone", [run]).execute(run) for name, run in arms.items()}
    assert {name: here.rows(run) for name, run in arms.items()} == apart


@pytest.mark.usefixtures("local_ray")
def test_an_execution_fails_the_forks_of_what_failed_and_goes_on(storage, arms):
    broken = replace(arms["bf16"], tokens_dir=storage / "no tokens")
    here = Here(storage, "study", list(arms.values()))
    runs = [replace(run, tokens_dir=here.tokens) for run in here.runs]
    end = execute_study(here.store, [broken, *runs[1:]])
    assert end.states == {
        run.run_id: state for run, state in zip(here.runs, ("failed", "failed", "finished"), strict=True)
    }
    status = here.store.run(arms["forked"].run_id).status()
    assert status.message.startswith(f"the run that it forks from, {broken.run_id}, failed before the fork: ")
