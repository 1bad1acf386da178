"""``search_study`` with a fake in the place of Ray: how rounds end, what is said, and what is left behind."""

import pytest

from ablate.execute.driver import request_stop
from ablate.search.engine import open_storage, seed_of
from ablate.search.recipes import plan_search
from ablate.store import StudyStore
from ablate.study import load_study
from ablate.workflow import Listener, Where
from ablate.workflow.search import search_study
from tests.cli.searched import SEARCH
from tests.search.made_up import facts


@pytest.fixture
def call(executor, tmp_path):
    """Return a function that searches in a storage; it returns the end and the sentences."""
    executor.loss = lambda run, _tokens: (
        3 + seed_of(run.arm.partition(" @ ")[0]) % 1000 / 1000
    )

    def search(name="runs"):
        (tmp_path / "s.yaml").write_text(SEARCH)
        listener = Listener()
        listener.say = (said := []).append
        planned = plan_search(load_study("s.yaml"))
        return search_study(
            planned, Where(storage=tmp_path / name), listener, file="s.yaml"
        ), said

    return search


def ledgers(end):
    """Return all of the trials but the times at which they were asked and told."""
    planned = plan_search(load_study("s.yaml"))
    return [*map(facts, planned.read(open_storage(end.pages.parent)))]


def states(end):
    return {trial[3] for trials in ledgers(end) for trial in trials}


def test_a_cancelled_search_ends_between_two_rounds_and_goes_on(call, executor):
    executor.begins = lambda store: request_stop(store.path)
    end, said = call()
    assert (end.exit_code, len(executor.ran)) == (130, 3)
    assert (
        said[0]
        == "Search s: 8 recipes, 8 to try at the first budget; 0 trials have ended before."
    )
    assert said[-5:-3] == [
        "Starting Ray on this machine …",
        "Round 1 at 40k tokens: trials 1–3 of 8",
    ]
    again = f"ablate search s.yaml --storage {end.pages.parents[1]}"
    assert (
        said[-2] == f"\nStopped. Trials that have ended are kept; go on with: {again}"
    )
    assert (end.pages / "search.html").exists()
    assert not (end.pages / "confirm.yaml").exists()
    executor.begins = lambda _store: None
    end, _ = call()
    assert (end.exit_code, (end.pages / "confirm.yaml").exists()) == (0, True)
    again, said = call()
    assert again.found == end.found
    assert "Starting Ray on this machine …" not in said
    assert len(set(executor.ran)) == len(executor.ran)
    assert [arm.name for arm in StudyStore(end.pages.parent).plan().arms] == [
        arm for arm, _ in executor.ran
    ]
    assert ledgers(end) == ledgers(call("whole")[0])


def test_a_failed_recipe_is_left_out_and_said(call, executor):
    executor.end = lambda run: (
        "failed" if run.arm.startswith(("tseng", "D")) else "finished"
    )
    end, said = call()
    assert end.exit_code == 0
    assert "Failed: tseng: no such luck" in said
    assert states(end) == {"COMPLETE", "FAIL"}
    assert not {trial[2]["candidate"] for trial in ledgers(end)[1]} & {
        "tseng",
        "D none",
        "D sr",
    }


def test_a_failed_baseline_ends_the_search_until_it_is_tried_again(call, executor):
    executor.end = lambda run: "failed" if run.arm.startswith("bf16") else "finished"
    end, said = call()
    assert (end.exit_code, states(end)) == (1, {"RUNNING"})
    assert (
        "Without the baseline there is nothing to hold recipes against; go on with"
        in said[-2]
    )
    executor.end = lambda _run: "finished"
    assert call()[0].exit_code == 0


def test_a_lost_head_is_a_problem(call, executor):
    executor.stops_after, executor.problem = 4, "Ray's head has gone"
    end, said = call()
    again = f"ablate search s.yaml --storage {end.pages.parents[1]}"
    assert (end.exit_code, said[-2]) == (
        1,
        f"\nRay's head has gone; go on with: {again}",
    )
