"""Fronts as defined, and the order in which trials go on to a larger budget."""

from optuna.trial import TrialState, create_trial

from ablate.search.engine import VIOLATION
from ablate.search.halving import DIVERGED, fronts, promoted
from ablate.search.tune import best_trial


def trials_of(*values):
    """Return trials of (loss, step time) or (loss, step time, violation); None: failed."""
    made = []
    for number, value in enumerate(values):
        if value is None:
            trial = create_trial(state=TrialState.FAIL)
        else:
            constraints = {VIOLATION: value[2]} if len(value) == 3 else {}
            trial = create_trial(values=value[:2], constraints=constraints)
        trial.number = number
        made.append(trial)
    return made


def numbers(trials):
    return [trial.number for trial in trials]


def test_the_front_is_what_nothing_dominates():
    trials = trials_of(
        (1.0, 1.0), (2.0, 0.5), (2.0, 1.0), (0.5, 0.1, 1.0), None, (1.0, 1.0)
    )
    assert [numbers(one) for one in fronts(trials)] == [[0, 1, 5], [2]]
    assert [*fronts([]), *fronts(trials_of(None))] == []


def test_what_diverged_is_never_chosen():
    assert (
        best_trial(trials_of((1.0, 1.0, 1.0), (3.0, 1.0), (2.0, 1.0), None)).number == 2
    )
    assert best_trial(trials_of((1.0, 1.0, 1.0))) is None


def test_promotion_keeps_the_whole_front_and_the_share_and_misses_last():
    assert len(promoted(trials_of(*((i / 10, 1 - i / 10) for i in range(5))), 0.2)) == 5
    trials = trials_of((3.0, 3.0), (0.0, 0.0), (2.0, 1.0), (1.0, 2.0))
    assert numbers(promoted(trials, 0.5)) == [1, 3]  # by front, then by loss
    assert numbers(promoted(trials, 0.6)) == [1, 3, 2]
    missed = trials_of(
        (0.0, 0.0), (1.0, 1.0, 0.3), (1.0, 1.0, 0.1), (1.0, 1.0, DIVERGED)
    )
    assert numbers(promoted(missed, 1.0)) == [0, 2, 1]
