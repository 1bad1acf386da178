"""``stop:`` and seeds until settled in a study: what they mean, and every way to get them wrong."""

import pytest

from ablate.store.plan_file import Settled, StopRule

STUDY = """\
name: s
baseline: a
target: {val_loss: 3.3}
seeds: %s
stop: %s
arms: {a: , b: {recipe: fp8}}
"""


def test_the_rules(study):
    settled = "{until: settled, at_least: 3, at_most: 5, narrower_than: 10%}"
    looked = Settled(looks=(3, 4, 5), narrower_than=0.1)
    assert study(STUDY % (settled, "{diverged: 2}")).stop == StopRule(diverged=2, settled=looked)
    shortest = study(STUDY % ("{until: settled, at_most: 3}", "null"))
    assert shortest.stop == StopRule(settled=Settled(looks=(2, 3)))
    assert study(STUDY % (3, "{diverged: 1}")).stop == StopRule(diverged=1)
    assert study(STUDY % (3, "null")).stop is None


@pytest.mark.parametrize(
    ("seeds", "rule", "line"),
    [
        (3, "{}", "5:7: stop: a stop rule without a rule (give 'diverged')"),
        (3, "{diverge: 2}", "5:8: stop.diverge: unknown key (did you mean 'diverged'?)"),
        (3, "{hopeless: {cost_above: 0.1}}", "5:8: stop.hopeless: unknown key (expected diverged)"),
        (
            3,
            "{diverged: 3}",
            "5:18: stop.diverged: with 3 seeds nothing is left to be stopped then (at most 2)",
        ),
        (
            "{until: settled, at_least: 1, at_most: 4}",
            "null",
            "4:35: seeds.at_least: a look needs 2 seeds for an interval, got 1",
        ),
        (
            "{until: settled, at_most: 2}",
            "null",
            "4:34: seeds.at_most: at most 2 seeds leave nothing to stop after 2 (from 3 up)",
        ),
        (
            "{until: settled, at_most: 60}",
            "null",
            "4:34: seeds.at_most: a look after each of 60 seeds is too much (at most 50)",
        ),
    ],
)
def test_faults(problems, seeds, rule, line):
    assert problems(STUDY % (seeds, rule)) == [line]
