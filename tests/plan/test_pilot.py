"""What two runs of the baseline say of a study: on curves whose crossings are known in closed form."""

import math
from dataclasses import replace

import pytest

from ablate.plan import StudyProgress
from ablate.plan.estimate import SPREAD, START_SEC, cost_found
from ablate.plan.pilot import PAIRED, PilotRun, Reached, advise, with_target

STUDY = """\
name: s
baseline: a
target: null
seeds: 3
base:
  training: {tokens: 409_600, eval_every_tokens: 20_480}
arms:
  a:
  b: {recipe: mxfp4}
"""
BUDGET = 409_600


def curve(seed, slower=1.0):
    """A straight line in ln tokens, on which every way of reading a crossing agrees."""
    tokens = [20_480 * n for n in range(1, 21)]
    loss = [6.0 - 0.3 * math.log(position / slower) for position in tokens]
    return PilotRun(seed=seed, tokens=tokens, val_loss=loss)


def advice(planned, *curves):
    return advise(planned, curves, StudyProgress(states={}, tokens_per_sec={}), cores=2)


def test_the_target_is_reached_by_both_with_room_for_slower_arms(plan):
    advised = advice(plan(STUDY), curve(0), curve(1, 1.1))
    take = advised.take
    assert (advised.own, advised.has_target, advised.why_not) == (None, False, None)
    assert take.val_loss == pytest.approx(
        6 - 0.3 * math.log(0.7 * BUDGET / 1.1), abs=1e-3
    )
    # the loss has three digits
    assert take.tokens[1] == pytest.approx(0.7 * BUDGET, rel=4e-3)
    assert take.tokens[1] / take.tokens[0] == pytest.approx(1.1, rel=1e-6)
    assert take.room == pytest.approx(BUDGET / take.tokens[1] - 1)


@pytest.mark.parametrize(
    ("paired", "factor"),
    [("true", PAIRED), ("false", math.sqrt(2))],
)
def test_the_seeds_are_those_that_the_spread_asks_for(plan, paired, factor):
    study = STUDY.replace("seeds: 3\n", f"seeds: 3\npaired_seeds: {paired}\n")
    for slower in (1.01, 1.3):
        advised = advice(plan(study), curve(0), curve(1, slower))
        spread = advised.spread
        over_runs = math.log(slower) / math.sqrt(2)
        assert spread.runs == pytest.approx(over_runs, rel=1e-6)
        assert spread.pairs == pytest.approx(factor * max(SPREAD / PAIRED, spread.runs))
        for row in advised.needed:
            if row.seeds is None:
                continue
            fewer, enough = (
                cost_found(seeds, 1, moderated=True, spread=spread.pairs)
                for seeds in (row.seeds - 1, row.seeds)
            )
            assert enough <= row.cost < (fewer or math.inf)


def test_the_time_is_of_what_is_left_at_the_speed_of_each_arm(plan):
    planned = plan(STUDY)
    runs = {run.id: "finished" for run in planned.arm("a").runs[:2]}
    progress = StudyProgress(states=runs, tokens_per_sec={"a": 1000.0, "b": 500.0})
    advised = advise(planned, [curve(0), curve(1)], progress, cores=1)
    work = BUDGET + 20 * 65_536 / 3
    assert advised.seconds == pytest.approx(work / 1000 + 3 * work / 500 + START_SEC)
    assert advised.slower == {"a": 1.0, "b": 2.0}
    for row in (row for row in advised.needed if row.seeds is not None):
        assert row.seconds == pytest.approx(
            (row.seeds - 2) * work / 1000 + row.seeds * work / 500 + START_SEC
        )


def test_the_studys_own_target_stays_where_it_has_room(plan):
    early, late, missed = (
        advice(plan(STUDY.replace("null", f"{{val_loss: {loss}}}")), curve(0), curve(1))
        for loss in (2.4, 2.13, 1.0)
    )
    assert early.take is early.own
    assert late.own is not None
    assert missed.own is None
    assert missed.take.val_loss == late.take.val_loss > late.own.val_loss


def test_no_target_beyond_the_begin_of_the_decay(plan):
    wsd = STUDY.replace(
        "tokens: 409_600,", "tokens: 409_600, schedule: wsd, decay_tokens: 204_800,"
    )
    advised = advice(plan(wsd), curve(0), curve(1))
    assert max(advised.take.tokens.values()) == pytest.approx(0.7 * 204_800, rel=4e-3)
    assert advised.take.room == pytest.approx(1 / 0.7 - 1, abs=0.01)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"diverged": True}, "seed 1 diverged"),
        ({"tokens": [20_480], "val_loss": [3.0]}, "seed 1 has 1 evaluations"),
        # above a guess among 256
        ({"val_loss": [5.6] * 20}, "do not fall steadily below a guess"),
    ],
)
def test_runs_that_say_nothing_give_no_target(plan, changes, reason):
    advised = advice(plan(STUDY), curve(0), replace(curve(1), **changes))
    assert reason in advised.why_not
    assert (advised.take, advised.spread, advised.needed) == (None, None, ())


@pytest.mark.parametrize(
    "line", ["target: null", "target:", "target: ~   # left to the pilot"]
)
def test_the_target_takes_the_place_of_null_and_nothing_else_changes(line):
    target = Reached(val_loss=1.95, tokens={0: 1000.4, 1: 2000.0}, room=0.4)
    text = f"# a comment\nname: s  # one\n{line}\nseeds: 3  # another\n"
    comment = (
        "two runs of the baseline reach it after 1,000 and 2,000 tokens (ablate pilot)"
    )
    written = f"target: {{val_loss: 1.95}}  # nats/token; {comment}"
    assert with_target(text, 3, target, "nats/token") == text.replace(line, written)
    text = text.replace(line, "target: {val_loss: 2.0}")
    assert with_target(text, 3, target, "nats/token") is None
