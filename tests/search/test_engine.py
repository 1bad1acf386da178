"""The engine over both spaces: rounds, and that neither a kill nor an interruption changes what is tried."""

import itertools
import math

import optuna
import pytest

from ablate.base.errors import UserError
from ablate.search.engine import JOURNAL, TrialResult, open_storage, search
from tests.exhaustive import rest_exhaustive
from tests.search.made_up import SEARCHES, go_grid, go_rates, groups, train_all

BOTH = pytest.mark.parametrize("go", SEARCHES.values(), ids=SEARCHES)
in_memory = optuna.storages.InMemoryStorage


@pytest.fixture(scope="module")
def whole():
    """What each search comes to when nothing happens."""
    return {go: go(in_memory()) for go in SEARCHES.values()}


def ending(at, function):
    """End by Ctrl-C at the n-th call."""
    count = itertools.count(1)

    def call(*args, **kwargs):
        if next(count) == at:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    return call


WRITES = (
    "create_new_trial", "set_trial_intermediate_value", "set_trial_state_values", "set_trial_user_attr",
    "set_trial_system_attr",
)  # fmt: skip


@BOTH
@pytest.mark.parametrize(
    "at", rest_exhaustive(range(1, 80, 3), lambda at: at in (1, 16, 61))
)
def test_a_search_that_ends_before_a_write_to_its_storage_loses_nothing(
    go, whole, monkeypatch, at
):
    storage = in_memory()
    writes = ending(at, lambda write, *args, **kwargs: write(*args, **kwargs))
    with monkeypatch.context() as patch:
        for name in WRITES:
            real = getattr(storage, name)
            patch.setattr(
                storage,
                name,
                lambda *args, real=real, **kwargs: writes(real, *args, **kwargs),
            )
        with pytest.raises(KeyboardInterrupt):
            go(storage)
    assert go(storage) == whole[go]


def test_a_round_is_of_its_size_and_runs_all_groups_together():
    sizes = []

    def run(asked):
        sizes.append(len(asked))
        return train_all(asked)

    assert search(groups(in_memory()), 3, run)
    assert sizes == [6, 6, 2]


def test_pruning_does_not_depend_on_when_the_runner_looks(whole):
    late = go_rates(in_memory(), lambda run: lambda asked: run(asked, look=False))
    assert late == whole[go_rates]
    assert any(trial[3] == "PRUNED" and trial[6] for trials in late for trial in trials)


def test_more_trials_go_on_from_those_that_are_there():
    asked = []

    def noting(run):
        return lambda batch: asked.extend(batch) or run(batch)

    storage = in_memory()
    go_rates(storage)
    assert go_rates(storage, noting, trials=10) == go_rates(in_memory(), trials=10)
    assert len(asked) == 6
    storage = in_memory()
    go_grid(storage, trials=14)  # TPE picks half of its last round
    grown = go_grid(storage, trials=20)
    whole = go_grid(in_memory(), trials=20)
    assert grown[0] == whole[0]
    names = [trial[2]["candidate"] for trial in grown[1]]
    assert len(set(names)) == len(names)
    assert {*names} >= {trial[2]["candidate"] for trial in whole[1]}


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_is_no_result(value):
    tuned = groups(in_memory())
    with pytest.raises(ValueError, match="not finite"):
        search(tuned, 2, lambda asked: [TrialResult(values=(value,))] * len(asked))
    for group in tuned:
        assert {trial.state.name for trial in group.study.get_trials()} == {"RUNNING"}


@BOTH
@pytest.mark.parametrize("cut", [1, 15, 39, 700, 5_000, 20_000])
def test_a_journal_that_a_kill_cut_is_gone_on_with(go, whole, tmp_path, cut):
    """A kill at any write leaves the journal's beginning, in whole lines or not."""
    go(open_storage(tmp_path))
    path = tmp_path / JOURNAL
    path.write_bytes(path.read_bytes()[:-cut])
    assert go(open_storage(tmp_path)) == whole[go]


def test_what_cannot_be_opened_is_one_line(tmp_path):
    (tmp_path / JOURNAL).write_text('{"no": "journal"}\n')
    with pytest.raises(
        UserError, match=f"cannot open Optuna's storage {tmp_path / JOURNAL}: "
    ) as caught:
        open_storage(tmp_path)
    assert "\n" not in str(caught.value)
