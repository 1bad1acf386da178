"""``stop:`` in a study: what it means, and every way to get it wrong."""

import pytest

from ablate.store.lock import Hopeless, StopRule

STUDY = """\
name: s
baseline: a
target: {val_loss: 3.3}
seeds: %s
stop: %s
arms: {a: , b: {recipe: fp8}}
"""


def test_a_whole_rule(study):
    loaded = study(STUDY % (5, "{diverged: 2, hopeless: {cost_above: 0.1, spending: pocock, looks: [2, 3]}}"))
    assert loaded.stop == StopRule(
        diverged=2, hopeless=Hopeless(cost_above=0.1, spending="pocock", looks=(2, 3, 5))
    )


def test_defaults(study):
    assert study(STUDY % (4, "{hopeless: {cost_above: 0}}")).stop == StopRule(
        hopeless=Hopeless(cost_above=0.0, spending="obrien-fleming", looks=(2, 3, 4))
    )
    assert study(STUDY % (3, "{diverged: 1}")).stop == StopRule(diverged=1)
    assert study(STUDY % (3, "null")).stop is None


@pytest.mark.parametrize(
    ("seeds", "rule", "line"),
    [
        (3, "{}", "5:7: stop: a stop rule without a rule (give 'diverged', 'hopeless' or both)"),
        (3, "{diverge: 2}", "5:8: stop.diverge: unknown key (did you mean 'diverged'?)"),
        (3, "{hopeless: {}}", "5:18: stop.hopeless: missing key 'cost_above'"),
        (
            2,
            "{hopeless: {cost_above: 0.1}}",
            (
                "5:18: stop.hopeless: 2 seeds give no two looks, the first after 2 seeds "
                "(from 3 seeds up there is something to be stopped)"
            ),
        ),
        (
            3,
            "{diverged: 3}",
            "5:18: stop.diverged: with 3 seeds nothing is left to be stopped then (at most 2)",
        ),
        (
            5,
            "{hopeless: {cost_above: 0.1, looks: [1, 3]}}",
            "5:44: stop.hopeless.looks[0]: a look needs 2 seeds for an interval, got 1",
        ),
        (
            5,
            "{hopeless: {cost_above: 0.1, looks: [3, 2]}}",
            "5:47: stop.hopeless.looks[1]: a look after 2 seeds comes before the one after 3",
        ),
        (
            5,
            "{hopeless: {cost_above: 0.1, looks: [3, 3]}}",
            "5:47: stop.hopeless.looks[1]: a second look after 3 seeds",
        ),
        (
            5,
            "{hopeless: {cost_above: 0.1, looks: [2, 6]}}",
            "5:47: stop.hopeless.looks[1]: a look after 6 seeds, of which the study has 5",
        ),
        (
            5,
            "{hopeless: {cost_above: 0.1, looks: [5]}}",
            (
                "5:43: stop.hopeless.looks: one look at all seeds can stop nothing "
                "(the last look is at all seeds anyway)"
            ),
        ),
        (
            60,
            "{hopeless: {cost_above: 0.1}}",
            "5:18: stop.hopeless: a look after each of 60 seeds is too much (give looks: [...], at most 50)",
        ),
        (
            5,
            "{hopeless: {cost_above: -0.1}}",
            "5:31: stop.hopeless.cost_above: expected a number from 0 up, got -0.1",
        ),
        (
            5,
            "{hopeless: {cost_above: 10 %}}",
            "5:31: stop.hopeless.cost_above: expected a number, got '10 %'",
        ),
        (
            5,
            "{hopeless: {cost_above: 0.1, spending: pococks}}",
            (
                "5:46: stop.hopeless.spending: expected obrien-fleming or pocock, got 'pococks' "
                "(did you mean 'pocock'?)"
            ),
        ),
        (
            5,
            "{hopeless: {cost_above: 0.1, looks: []}}",
            "5:43: stop.hopeless.looks: expected at least one entry",
        ),
    ],
)
def test_faults(problems, seeds, rule, line):
    assert problems(STUDY % (seeds, rule)) == [line]
