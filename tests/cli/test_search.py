"""``ablate search`` whole: Ray, the front, a kill, what it is refused for. Other ends: ``tests/workflow``."""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from ablate.search.engine import open_storage
from ablate.search.recipes import plan_search, tried_plan
from ablate.store import StudyStore
from ablate.store.study_lock import running
from ablate.study import load_study
from tests.cli.command import ablate
from tests.cli.searched import SEARCH
from tests.waiting import start_ablate, wait_until


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "s.yaml").write_text(
        SEARCH.replace("base:\n", "base:\n  trainer: searched.py:run\n")
    )
    shutil.copy(Path(__file__).parent / "searched.py", tmp_path)
    return tmp_path


def ledgers(folder):
    return plan_search(load_study(folder / "s.yaml")).read(
        open_storage(folder / "runs" / "s")
    )


def trained(folder):
    path = folder / "trained"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.exhaustive
def test_a_search_killed_and_gone_on_with_to_the_study_that_confirms_it(folder):
    (folder / "slow").touch()
    process = start_ablate("search", "s.yaml", cwd=folder)
    wait_until(lambda: trained(folder) >= 4, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert {trial.state.name for trial in ledgers(folder)[0]} == {"RUNNING", "COMPLETE"}
    (folder / "slow").unlink()
    time.sleep(2)
    process = start_ablate("search", "s.yaml", cwd=folder)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    assert "Round 3 at 40k tokens: trials 7–8 of 8" in out
    found = json.loads((folder / "runs/s/search/search.json").read_text())
    assert found["is_done"]
    tried, went_on = (rung["points"] for rung in found["rungs"])
    # of 8: bf16, tseng and three GEMMs × two
    assert len({trial["name"] for trial in tried}) == 8
    front = {trial["name"] for trial in went_on if trial["on_front"]}

    arms = StudyStore(folder / "runs/s").plan().arms
    assert [arm.name for arm in arms][:2] == ["bf16 @ 40k", "tseng @ 40k"]
    assert len(arms) == len(tried) + len(went_on)
    # what was killed in the middle is run again
    assert trained(folder) <= len(arms) + 3
    assert f"{len(arms)} of {len(arms)} done" in ablate("status s.yaml", cwd=folder).out

    confirm = json.loads(
        ablate("plan runs/s/search/confirm.yaml --json", cwd=folder).out
    )
    assert {arm["name"] for arm in confirm["arms"]} == {*front, "bf16"}
    seeds = [run["seed"] for run in confirm["arms"][0]["runs"]]
    assert seeds == [*range(1001, 1006)]

    before, count = ledgers(folder), trained(folder)
    again = ablate("search s.yaml --json", cwd=folder)
    assert (again.code, json.loads(again.out)) == (0, found)
    assert (ledgers(folder), trained(folder)) == (before, count)
    assert (folder / "runs" / "mlflow.db").exists()


def test_a_second_search_of_the_name_is_refused(folder):
    store = StudyStore(folder / "runs" / "s")
    with running(store, tried_plan(plan_search(load_study(folder / "s.yaml")))):
        assert (
            "is being run by another process"
            in ablate("search s.yaml", cwd=folder).line
        )
    shutil.rmtree(store.path)
    (store.path / "runs").mkdir(parents=True)
    assert "holds a study of this name" in ablate("search s.yaml", cwd=folder).line
