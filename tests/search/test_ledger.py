"""Trials in Optuna's storage: written whole, told once, found again by another process."""

import math

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution

from ablate.base.errors import UserError
from ablate.search.ledger import JOURNAL, Ledger, open_storage, study_of, violation
from ablate.search.spaces import best_trial

TWO = ("loss", "step time")
SPACE = {"rate": FloatDistribution(1e-4, 1e-2, log=True), "rule": CategoricalDistribution(["even", "floor"])}


def test_what_is_written_is_found_again(opens):
    ledger = Ledger(opens(), "search", TWO)
    first = ledger.add({"rate": 1e-3}, {"rate": SPACE["rate"]}, {"round": 0, "runs": ["a"]})
    ledger.add({"rate": 2e-3, "rule": "even"}, SPACE, {"round": 0, "runs": ["b"]})
    ledger.add({}, {}, {"round": 1, "runs": ["c"]})
    ledger.tell(first.number, [1.5, 0.8], violation=0.2)
    ledger.tell(1, failed="the trainer raised")
    again = Ledger(opens(), "search", TWO).trials()
    assert optuna.load_study(study_name="search", storage=opens()).metric_names == list(TWO)
    assert [trial.state.name for trial in again] == ["COMPLETE", "FAIL", "RUNNING"]
    assert (again[0].values, violation(again[0]), again[0].params) == ([1.5, 0.8], 0.2, {"rate": 1e-3})
    assert again[1].params == {"rate": 2e-3, "rule": "even"}
    assert [trial.user_attrs["runs"] for trial in again] == [["a"], ["b"], ["c"]]
    assert again[1].user_attrs["failed"] == "the trainer raised"
    assert [trial.number for trial in again] == [0, 1, 2]
    with pytest.raises(ValueError, match="COMPLETE"):
        ledger.tell(0, [2.0, 0.8])
    frozen = study_of(again).get_trials()  # trials keep their meaning in memory
    assert [one.state.name for one in frozen] == ["COMPLETE", "FAIL", "RUNNING"]
    assert frozen[0].constraints == {"violation": 0.2}


def test_a_pruned_trial_keeps_what_was_seen_of_it(opens):
    ledger = Ledger(opens(), "tune")
    number = ledger.add({"rate": 9e-3}, {"rate": SPACE["rate"]}, {}).number
    ledger.tell(number, curve={50: 9.0, 100: 1.8})
    pruned = Ledger(opens(), "tune").trials()[0]
    assert (pruned.state.name, pruned.intermediate_values) == ("PRUNED", {50: 9.0, 100: 1.8})
    assert best_trial([pruned]) is None
    assert study_of([pruned]).get_trials()[0].intermediate_values == {50: 9.0, 100: 1.8}


@pytest.mark.parametrize("values", [[math.inf], [math.nan]])
def test_what_is_not_finite_is_no_result(tmp_path, values):
    ledger = Ledger(open_storage(None, tmp_path), "tune")
    number = ledger.add({}, {}, {}).number
    with pytest.raises(ValueError, match="not finite"):
        ledger.tell(number, values)
    assert ledger.trials()[0].state.name == "RUNNING"


@pytest.mark.parametrize("cut", range(1, 40, 7))
def test_a_journal_whose_last_line_is_cut_is_gone_on_with(tmp_path, cut):
    ledger = Ledger(open_storage(None, tmp_path), "tune")
    ledger.add({"rate": 1e-3}, {"rate": SPACE["rate"]}, {"round": 0})
    ledger.tell(0, [1.0])
    path = tmp_path / JOURNAL
    path.write_bytes(path.read_bytes()[:-cut])
    ledger = Ledger(open_storage(None, tmp_path), "tune")
    assert [trial.state.name for trial in ledger.trials()] == ["RUNNING"]
    ledger.tell(0, [1.0])
    assert Ledger(open_storage(None, tmp_path), "tune").trials()[0].values == [1.0]


def test_what_cannot_be_opened_is_one_line(tmp_path):
    (tmp_path / JOURNAL).write_text('{"no": "journal"}\n')
    for url, said in (
        (None, "not a journal of Optuna"),
        ("grpc://nowhere", "expected grpc://HOST:PORT"),
        ("nonsense://me:secret@x/y", "cannot open Optuna's storage nonsense://"),
        (f"sqlite:///{tmp_path}/no/such/folder/optuna.db", "cannot open"),
    ):
        with pytest.raises(UserError, match=said) as caught:
            open_storage(url, tmp_path)
        assert "secret" not in str(caught.value)
        assert "\n" not in str(caught.value)


def test_another_number_of_objectives_is_refused(tmp_path):
    storage = open_storage(None, tmp_path)
    Ledger(storage, "search", TWO)
    with pytest.raises(UserError, match="expected 1"):
        Ledger(storage, "search")
