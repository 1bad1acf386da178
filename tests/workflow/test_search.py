"""``search_study`` with a fake in the place of Ray: how rounds end, what is said, and what is left behind."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from ablate.base.errors import UserError
from ablate.base.files import append_line
from ablate.execute.driver import ExecutionEnd
from ablate.reports.pages.document import search_document
from ablate.search.ledger import Ledger, open_storage
from ablate.search.plan import plan_search
from ablate.search.spaces import seed_of
from ablate.store import Status
from ablate.study import load_study
from ablate.workflow import Listener, Where
from ablate.workflow.search import search_study
from tests.exhaustive import rest_exhaustive

SEARCH = """\
name: s
baseline: bf16
target: {val_loss: 2.0}
base:
  model: {width: 64, layers: 2, heads: 2, ffn: 192}
  training: {eval_every_tokens: 20_000, eval_tokens: 8192}
arms:
  bf16: {recipe: bf16}
  tseng: {recipe: tseng}
grid:
  senseless: drop
  factors:
    recipe.gemms: {none: [], F: [fprop], D: [dgrad], F+D+W: [fprop, dgrad, wgrad]}
    recipe.stabiliser: [none, sr]
search: {hardware: B200, shapes: llama-8b, trials: 8, budgets: [40_000, 80_000], at_once: 3}
"""


class Notes(Listener):
    def __init__(self):
        self.said = []

    def say(self, sentence):
        self.said.append(sentence)

    def __str__(self):
        return "\n".join(self.said)


class Executor:
    """Runs in the place of Ray: writes what a trainer would."""

    def __init__(self):
        self.ran = []
        self.stops_after = 1_000_000
        self.problem = None
        self.fails = lambda _run: False

    def __call__(self, store, todo, **_):
        states = {}
        for run in todo:
            if len(self.ran) >= self.stops_after:
                return ExecutionEnd(states=states, interrupted=self.problem is None, problem=self.problem)
            folder = store.run(run.run_id)
            folder.create(asdict(run.config))
            state = "failed" if self.fails(run) else "finished"
            if state == "finished":
                name, tokens = run.arm.partition(" @ ")[::2]
                loss = 3 + seed_of(name) % 1000 / 1000
                for share in (0.5, 1):
                    row = {"kind": "eval", "tokens": int(int(tokens[:-1]) * 1000 * share), "step": 1}
                    append_line(folder.metrics_path, row | {"val_loss": loss / share**0.1})
            folder.write_status(Status(state=state, attempt=1, message="no such luck"))
            self.ran.append(run.arm)
            states[run.run_id] = state
        return ExecutionEnd(states=states, interrupted=False)


@pytest.fixture
def executor(monkeypatch):
    fake = Executor()
    monkeypatch.setattr("ablate.execute.driver.execute_study", fake)
    monkeypatch.setattr("ablate.execute.cluster.connection", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr("ablate.track.process.start_mirror", lambda *_: _NoMirror())
    return fake


class _NoMirror:
    tracking_uri = "nowhere"

    def stop(self):
        return None


@pytest.fixture
def call(executor, tmp_path):
    (tmp_path / "s.yaml").write_text(SEARCH)

    def search(name="runs", text=SEARCH):
        (tmp_path / "s.yaml").write_text(text)
        notes = Notes()
        planned = plan_search(load_study(tmp_path / "s.yaml"))
        return search_study(planned, Where(storage=tmp_path / name), notes, file="s.yaml"), notes

    return search


def ledgers(end):
    storage = open_storage(None, end.pages.parent)
    names = [f"s @ {budget} tokens" for budget in ("40k", "80k")]
    return [Ledger(storage, name, ("loss", "step time")).trials() for name in names]


def facts(budgets):
    """Return all of the trials but the times at which they were asked and told."""
    return [
        [
            (t.number, t.params, t.user_attrs, t.state, t.values, t.constraints, t.intermediate_values)
            for t in one
        ]
        for one in budgets
    ]


def test_a_search_to_its_end_and_again(call, executor):
    end, said = call()
    assert end.exit_code == 0
    for sentence in (
        "Search s: 8 recipes, 8 to try at the first budget; 0 trials have ended before.",
        "Starting Ray on this machine …",
        "Round 1 at 40k tokens: trials 1–3 of 8",
        "Round 3 at 40k tokens: trials 7–8 of 8",
    ):
        assert sentence in said.said
    assert (end.pages / "confirm.yaml").exists()
    count, before = len(executor.ran), ledgers(end)
    again, said = call()
    assert search_document(again.found) == search_document(end.found)
    assert len(executor.ran) == count
    assert ledgers(again) == before
    assert not [sentence for sentence in said.said if "Starting Ray" in sentence]


@pytest.mark.parametrize("after", rest_exhaustive([0, 2, 5, 8, 9], lambda after: after == 5))
def test_an_interrupted_search_goes_on(call, executor, after):
    whole, _ = call("whole")
    executor.ran.clear()
    executor.stops_after = after
    end, said = call()
    assert end.exit_code == 130
    again = f"ablate search s.yaml --storage {end.pages.parents[1]}"
    assert said.said[-1] == f"\nStopped. Trials that have ended are kept; go on with: {again}"
    assert (end.pages / "search.html").exists()
    assert not (end.pages / "confirm.yaml").exists()
    assert "RUNNING" in {trial.state.name for trials in ledgers(end) for trial in trials}
    executor.stops_after = 1_000_000
    end, _ = call()
    assert facts(ledgers(end)) == facts(ledgers(whole))
    assert len(set(executor.ran)) == len(executor.ran)
    lock = json.loads(Path(end.pages.parent / "plan.lock.json").read_text())
    assert [arm["name"] for arm in lock["arms"]] == executor.ran


def test_a_cancelled_search_ends_between_two_rounds(call, executor, monkeypatch):
    from ablate.execute.driver import request_stop

    real = Executor.__call__

    def cancelled(self, store, todo, **options):
        request_stop(store.path)
        return real(self, store, todo, **options)

    monkeypatch.setattr(Executor, "__call__", cancelled)
    end, said = call()
    assert end.exit_code == 130
    assert len(executor.ran) == 3
    assert "Stopped." in said.said[-1]


def test_a_failed_recipe_is_left_out_and_said(call, executor):
    executor.fails = lambda run: run.arm.startswith(("tseng", "D"))
    end, said = call()
    assert end.exit_code == 0
    assert "Failed: tseng: no such luck" in said.said
    first, second = ledgers(end)
    assert {trial.state.name for trial in first} == {"COMPLETE", "FAIL"}
    assert not {trial.user_attrs["candidate"] for trial in second} & {"tseng", "D none", "D sr"}


def test_a_failed_baseline_ends_the_search_until_it_is_tried_again(call, executor):
    executor.fails = lambda run: run.arm.startswith("bf16")
    end, said = call()
    assert end.exit_code == 1
    assert "Without the baseline there is nothing to hold recipes against; go on with" in said.said[-1]
    assert {trial.state.name for trial in ledgers(end)[0]} == {"RUNNING"}
    executor.fails = lambda _run: False
    assert call()[0].exit_code == 0


def test_a_lost_head_is_a_problem(call, executor):
    executor.stops_after, executor.problem = 4, "Ray's head has gone"
    end, said = call()
    assert end.exit_code == 1
    assert (
        said.said[-1]
        == f"\nRay's head has gone; go on with: ablate search s.yaml --storage {end.pages.parents[1]}"
    )


def test_a_search_of_the_name_with_other_seed_is_refused(call, executor):
    call()
    with pytest.raises(UserError, match="holds a search of this name with other seed"):
        call(text=SEARCH.replace("at_once: 3", "at_once: 3, seed: 4"))
