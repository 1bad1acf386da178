"""A run on two devices through Ray Train: its end, a process that dies, a fault of the run itself."""

from __future__ import annotations

import dataclasses
import json

import pytest

from ablate.execute import driver
from ablate.execute.driver import execute_study
from ablate.recipes import RecipeSpec, resolve
from ablate.run.config import Fork, ResourcesConfig
from ablate.store.leases import Leases

TWO = ResourcesConfig(devices_per_run=2)

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture
def no_pauses(monkeypatch):
    monkeypatch.setattr(driver, "PAUSES_SEC", (0.1, 0.1, 0.1))


def of_two(study):
    store, requests = study
    config = requests[0].config
    training = dataclasses.replace(config.training, tokens=40_000, eval_every_tokens=8192, eval_tokens=4096)
    model = dataclasses.replace(config.model, width=64, heads=2, ffn=96, layers=2)
    config = dataclasses.replace(config, training=training, model=model)
    return store, [dataclasses.replace(requests[0], resources=TWO, config=config)]


def ledger(run):
    leases = Leases(run.attempts)
    return [leases.read(number) for number in range(1, leases.latest() + 1)]


def check_whole(run, attempts):
    """Check that a run of two processes has ended well after so many attempts."""
    assert len(ledger(run)) == attempts
    assert ledger(run)[-1].outcome == "finished"
    assert json.loads(run.environment_path.read_text())["world_size"] == 2
    rows = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    steps = [(row["kind"], row["step"]) for row in rows]
    assert len(steps) == len(set(steps)), "no row twice"
    assert rows[-1]["kind"] == "eval"
    assert not list(run.path.glob(".*")), "nothing of Ray Train's is left"


@pytest.mark.exhaustive
@pytest.mark.usefixtures("local_ray")
def test_a_fork_on_two_devices_begins_with_the_state_of_both(study):
    store, (request,) = of_two(study)
    config = request.config
    fork = Fork(tokens=6 * 4096, recipe=config.recipe, training=config.training)
    config = dataclasses.replace(config, recipe=resolve(RecipeSpec(gemms=["fprop"])), fork=fork)
    forked = dataclasses.replace(request, run_id="f" * 16, config=config)
    result = execute_study(store, [request, forked], trainer="fake_trainers:together")
    assert set(result.states.values()) == {"finished"}
    for one, began in ((request, 0), (forked, 5)):
        check_whole(store.run(one.run_id), attempts=1)
        assert ledger(store.run(one.run_id))[0].resumed_from_step == began


@pytest.mark.exhaustive
@pytest.mark.usefixtures("local_ray", "no_pauses")
def test_the_other_process_is_killed_and_the_run_goes_on_from_the_checkpoint_of_both(study):
    store, (request,) = of_two(study)
    result = execute_study(store, [request], trainer="fake_trainers:second_process_dies_once")
    assert set(result.states.values()) == {"finished"}
    run = store.run(request.run_id)
    check_whole(run, attempts=2)
    assert ledger(run)[1].resumed_from_step > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("which", ["first", "second"])
@pytest.mark.usefixtures("local_ray", "no_pauses")
def test_a_fault_of_one_process_ends_the_other_and_is_not_repeated(study, which):
    store, (request,) = of_two(study)
    result = execute_study(store, [request], trainer=f"fake_trainers:{which}_process_fails")
    assert set(result.states.values()) == {"failed"}
    status = store.run(request.run_id).status()
    assert (status.state, status.message) == ("failed", f"ValueError: a bug in the {which} process")
    assert len(ledger(store.run(request.run_id))) == 1
