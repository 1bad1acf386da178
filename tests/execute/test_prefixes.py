"""Runs that begin with the state of another: through the run store, killed, and without one."""

from dataclasses import asdict, replace

import pytest
from kill import data, execute_and_die_at, in_child, rows_in, tiny_config, wait_for

from ablate.data import prepare
from ablate.execute.pending_runs import RunRequest
from ablate.execute.prefixes import (
    clean_prefixes,
    share_prefixes,
    waits_for,
    why_it_cannot_begin,
)
from ablate.execute.worker import execute_run
from ablate.recipes import Recipe, RecipeSpec, resolve
from ablate.run.config import Fork, ResourcesConfig
from ablate.run.diagnostics import Diagnostics
from ablate.run.ids import run_id
from ablate.store import Status, StudyStore
from ablate.store.leases import Leases

FORK = 5
STEP = 64


def request(config):
    resources = ResourcesConfig(checkpoint_every_sec=0.0)
    return RunRequest(
        run_id=run_id(config), config=config, tokens_dir=None, resources=resources
    )


@pytest.fixture(scope="module")
def arms():
    """A whole run in bf16, one that forks from it after five of eight steps, and one with a phase there."""
    base = replace(tiny_config(0), recipe=Recipe())
    late = resolve(RecipeSpec(phases=[{"from_tokens": FORK * STEP, "recipe": "mxfp4"}]))
    fork = Fork(tokens=FORK * STEP, recipe=base.recipe, training=base.training)
    forked = replace(base, recipe=tiny_config(0).recipe, fork=fork)
    return {
        "bf16": request(base),
        "forked": request(forked),
        "late": request(replace(base, recipe=late)),
    }


class Here:
    """A store with these arms, or some of them, executed one by one without Ray."""

    def __init__(self, storage, name, arms, *some, planned=()):
        self.store = StudyStore(storage / name)
        tokens = prepare(data(), storage / "tokens").folder
        names = some or tuple(arms)
        runs = []
        for run in map(arms.get, names):
            folder = self.store.run(run.run_id)
            folder.create(asdict(run.config))
            runs.append(
                replace(
                    run, tokens_dir=tokens, folder=folder, stop_path=storage / "stop"
                )
            )
        tasks, self.keys = share_prefixes(self.store, runs, planned)
        self.tasks = dict(zip(names, tasks, strict=True))
        self.folders = {name: task.folder for name, task in self.tasks.items()}

    def execute(self, name):
        end = execute_run(self.tasks[name])
        assert end.state == "finished", end
        return rows_in(self.folders[name].metrics_path)

    def began_at(self, name):
        return Leases(self.folders[name].attempts).read(1).resumed_from_step


@pytest.fixture(scope="module")
def apart(arms, tmp_path_factory):
    """The rows of each arm that is trained whole."""
    storage = tmp_path_factory.mktemp("apart")
    return {name: Here(storage, name, arms, name).execute(name) for name in arms}


def test_prefixes_give_the_rows_of_whole_runs_and_are_trained_once(
    tmp_path, arms, apart
):
    here = Here(tmp_path, "together", arms)
    holder = arms["bf16"].run_id
    assert [*map(waits_for, here.tasks.values())] == [None, holder, holder]
    for name, task in here.tasks.items():
        assert here.execute(name) == apart[name]
        assert here.began_at(name) == (0 if name == "bf16" else FORK - 1)
        assert waits_for(task) is None
        assert task.folder.state() == "finished"
    assert apart["forked"] != apart["bf16"]
    clean_prefixes(here.store, here.keys)
    assert not here.store.prefixes.exists()
    diagnosed = [replace(run, diagnostics=Diagnostics()) for run in arms.values()]
    requests, _ = share_prefixes(StudyStore(tmp_path / "diagnosed"), diagnosed)
    assert {run.prefix for run in requests} == {None}  # they share nothing


def test_what_is_still_to_come_keeps_its_prefix_for_the_same_code(
    tmp_path, arms, monkeypatch
):
    planned = [(arm.run_id, arm.config, arm.resources) for arm in arms.values()]
    here = Here(tmp_path, "study", arms, "bf16", planned=planned)
    here.execute("bf16")
    clean_prefixes(here.store, here.keys)
    assert here.store.prefixes.exists()
    for name, code, began in (("late", "other", 0), ("forked", None, FORK - 1)):
        with monkeypatch.context() as patch:
            if code:
                patch.setattr(
                    "ablate.execute.prefixes.code_digest", lambda code=code: code
                )
            here = Here(tmp_path, "study", arms, name, planned=planned)
            here.execute(name)
        assert here.began_at(name) == began


@pytest.mark.parametrize("part", ["metrics.jsonl", "safetensors", ".json"])
def test_a_damaged_prefix_is_trained_again(tmp_path, arms, apart, part):
    here = Here(tmp_path, "study", arms, "bf16", "forked")
    here.execute("bf16")
    (damaged,) = (
        path for path in here.store.prefixes.rglob(f"*{part}") if path.is_file()
    )
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    assert here.execute("forked") == apart["forked"]
    assert here.began_at("forked") == 0
    assert "prefix " in here.folders["forked"].attempt_log(1).read_text()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["bf16", "forked"])
def test_killed_at_any_operation_it_ends_with_the_same_rows(
    tmp_path, arms, apart, name
):
    """Each fourth operation on a file: those of the prefix are among them."""
    kills = 0
    for operation in range(3, 400, 4):
        here = Here(tmp_path, f"study {operation}", arms, "bf16", "forked")
        if name == "forked":
            here.execute("bf16")
        if wait_for(in_child(execute_and_die_at(here.tasks[name], operation))) == 0:
            break
        kills += 1
        assert here.execute(name) == apart[name]
        if name == "bf16":
            assert here.execute("forked") == apart["forked"]
            assert here.began_at("forked") == FORK - 1
    assert kills > 5


def test_a_fork_of_what_has_diverged_or_failed_does_not_begin(tmp_path, arms):
    parent = StudyStore(tmp_path / "study").run(arms["bf16"].run_id)
    parent.path.mkdir(parents=True)

    def forked(*names):
        return Here(tmp_path, "study", arms, *names).tasks["forked"]

    both = "bf16", "forked"
    for names, status, fault in (
        (["forked"], {"state": "pending"}, None),
        (
            ["forked"],
            {"state": "diverged", "step": 3, "message": "bad loss"},
            "diverged before the fork: bad loss",
        ),
        # after the fork: it trains the common steps itself
        (["forked"], {"state": "diverged", "step": 7}, None),
        # alone it does not wait for it
        (["forked"], {"state": "failed", "message": "full"}, None),
        (both, {"state": "failed", "message": "full"}, "failed before the fork: full"),
    ):
        parent.write_status(Status(**status))
        said = fault and f"the run that it forks from, {parent.run_id}, {fault}"
        assert why_it_cannot_begin(forked(*names)) == said
    parent.write_status(Status())
    parent.checkpoints.mkdir()
    # past the place it holds nothing
    for step, holder in ((FORK - 2, parent.run_id), (FORK - 1, None)):
        (parent.checkpoints / f"{step:012d}.json").touch()
        assert waits_for(forked(*both)) == holder


def test_a_run_carries_the_arithmetic_of_the_steps_that_it_begins_with(
    tmp_path, arms, monkeypatch
):
    here = Here(tmp_path, "study", arms, "bf16", "forked")
    with monkeypatch.context() as patch:
        patch.setattr("ablate.execute.training.fingerprint", lambda *_: "another")
        here.execute("bf16")
    here.execute("forked")
    forked = here.folders["forked"]
    first, last = forked.environment()["fingerprints"]
    assert first == "another" != last
    assert Leases(forked.attempts).read(1).fingerprint == last
    assert (
        f"steps before it were trained by other arithmetic: another; here it is {last}"
        in (forked.attempt_log(1).read_text())
    )


def test_a_run_takes_the_routes_of_a_run_that_was_interrupted_and_has_finished(
    tmp_path, arms
):
    base = replace(
        arms["bf16"].config, model=replace(arms["bf16"].config.model, experts=4)
    )
    other = replace(
        base, model=replace(base.model, routing="replay"), replayed=base.recipe
    )
    arms = {"replays": request(other), "learned": replace(request(base), records=True)}
    whole = Here(tmp_path, "whole", arms, "learned")
    losses = whole.execute("learned")
    here = Here(tmp_path, "study", arms)
    task = here.tasks["replays"]
    source = here.folders["learned"]
    assert waits_for(task) == source.run_id
    assert (
        why_it_cannot_begin(task)
        == f"no record of the routes of {source.run_id}: it is pending"
    )
    source.stop_path.touch()
    assert execute_run(here.tasks["learned"]).state == "stopped"
    assert here.execute("learned") == losses
    assert why_it_cannot_begin(task) is None
    routes = source.routes_path.read_bytes()
    assert routes == whole.folders["learned"].routes_path.read_bytes()
    assert here.execute("replays") == losses  # its recipe is the same
    source.routes_path.write_bytes(routes[:-9])
    assert "it is damaged" in why_it_cannot_begin(task)
    without = Here(tmp_path, "without", arms)
    execute_run(replace(without.tasks["learned"], records=False))
    reason = "it is finished before they were asked for; under another study name it is trained again"
    assert reason in why_it_cannot_begin(without.tasks["replays"])
