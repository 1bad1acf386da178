"""What a study may say of tuning, and the exact lines for what it may not."""

from __future__ import annotations

import pytest

from ablate.study.search_space import Choices, Range

HEAD = """\
name: s
baseline: a
target: {val_loss: 3.3}
base: {training: {tokens: 400_000, warmup_tokens: 20_000}}
arms:
  a: {recipe: bf16}
  b: {recipe: mxfp4}
  c: {recipe: fp8}
"""
RATE = "learning_rate: {low: 5.0e-4, high: 1.6e-2, log: true}"


def tune(fields=RATE, **keys):
    settings = {"tokens": 200_000, "trials": 8} | keys
    listed = "".join(f"  {key}: {value}\n" for key, value in settings.items() if value is not None)
    return f"{HEAD}tune:\n  fields:\n    {fields}\n{listed}"


def test_what_is_given_and_what_is_usual(study):
    found = study(tune()).tune
    assert found.fields == {"learning_rate": Range(low=5e-4, high=1.6e-2, log=True)}
    assert (found.tokens, found.sampler, found.trials, found.at_once, found.prune) == (
        200_000, "tpe", 8, 2, True,
    )  # fmt: skip
    assert [(group.name, group.arms) for group in found.groups] == [
        ("a", ("a",)),
        ("b", ("b",)),
        ("c", ("c",)),
    ]
    assert found.groups[0].shared == {"learning_rate": 4e-3}
    assert study(HEAD).tune is None


def test_seeds_are_fresh(study):
    first = 1_000_000
    assert study(tune(seeds=2)).tune.seeds == (first, first + 1)
    assert study(f"seeds: [{first}, 3]\n" + tune(seeds=2)).tune.seeds == (first + 1, first + 2)
    again = study(f"baseline_again: true\nseeds: [{first}, {first + 1}]\n" + tune())
    assert again.tune.seeds == (first + 4,)


def test_arms_of_a_group_share_a_search(study):
    found = study(tune(groups="{low: [b, c]}")).tune
    assert [(group.name, group.arms) for group in found.groups] == [("a", ("a",)), ("low", ("b", "c"))]
    assert [group.name for group in study(tune(groups="{b: [b, c]}")).tune.groups] == ["a", "b"]


def test_a_grid_has_a_trial_for_each_combination(study):
    fields = "{learning_rate: [2.0e-3, 4.0e-3, 8.0e-3], weight_decay: [0.0, 0.1]}"
    text = tune(sampler="grid", trials=None).replace(f"\n    {RATE}", f" {fields}")
    found = study(text).tune
    assert found.trials == 6
    assert found.fields["learning_rate"] == Choices(values=(2e-3, 4e-3, 8e-3))


def test_whole_numbers_stay_whole(study):
    found = study(tune("warmup_tokens: {low: 0, high: 100_000}")).tune
    assert found.fields["warmup_tokens"].whole
    assert found.fields["warmup_tokens"].at(0.3) == 30_000


FAULTS = {
    "no field": (
        tune("learnin_rate: [1.0e-3, 2.0e-3]"),
        "11:5: tune.fields.learnin_rate: no field of training (did you mean 'learning_rate'?)",
    ),
    "the budget": (
        tune("tokens: [1_000, 2_000]"),
        (
            "11:5: tune.fields.tokens: cannot be tuned (what the optimizer and its schedule use: "
            "learning_rate, warmup_tokens, decay_tokens, final_lr_ratio, weight_decay, beta1, beta2, "
            "adam_eps, grad_clip)"
        ),
    ),
    "a range upside down": (
        tune("learning_rate: {low: 2.0e-2, high: 1.0e-3}"),
        "11:26: tune.fields.learning_rate.low: low 0.02 is not below high 0.001",
    ),
    "the logarithm of nought": (
        tune("weight_decay: {low: 0.0, high: 1.0, log: true}"),
        "11:25: tune.fields.weight_decay.low: a logarithmic range begins above 0, got 0",
    ),
    "an end out of bounds": (
        tune("beta2: {low: 0.9, high: 1.5}"),
        "11:29: tune.fields.beta2.high: expected a number below 1, got 1.5",
    ),
    "an unknown key of a range": (
        tune("learning_rate: {low: 1.0e-3, high: 1.0e-2, logg: true}"),
        "11:48: tune.fields.learning_rate.logg: unknown key (did you mean 'log'?)",
    ),
    "an unknown key": (
        tune(trails=3),
        "14:3: tune.trails: unknown key (did you mean 'trials'?)",
    ),
    "a value twice": (
        tune("weight_decay: [0.1, 0.1]"),
        "11:25: tune.fields.weight_decay[1]: value 0.1 given twice",
    ),
    "no range and no list": (
        tune("weight_decay: 0.1"),
        "11:19: tune.fields.weight_decay: expected a list of values, or {low: …, high: …}, got 0.1",
    ),
    "one value": (
        tune("weight_decay: [0.1]"),
        (
            "11:19: tune.fields.weight_decay: expected at least two values (one value belongs in "
            "base.training)"
        ),
    ),
    "the study's own value left out": (
        tune("learning_rate: {low: 5.0e-3, high: 1.0e-2}"),
        (
            "11:20: tune.fields.learning_rate: the study's own learning_rate, 0.004, is not among the "
            "values (it is always tried, so that tuning can only gain; in 3 arms, first 'a')"
        ),
    ),
    "a grid with a range": (
        tune(sampler="grid", trials=None),
        (
            "11:20: tune.fields.learning_rate: a grid needs a list of values (or sampler: tpe, which "
            "takes ranges)"
        ),
    ),
    "a grid that is counted": (
        tune("weight_decay: [0.0, 0.1]", sampler="grid"),
        (
            "13:11: tune.trials: a grid has as many trials as it has combinations (leave it out: it is "
            "every combination of the lists)"
        ),
    ),
    "no number of trials": (
        tune(trials=None),
        "10:3: tune: missing key 'trials' (how many of each group; a grid may leave it out)",
    ),
    "more trials than there are values": (
        tune("weight_decay: [0.0, 0.1]"),
        (
            "13:11: tune.trials: 8 trials, but only 2 combinations (or sampler: grid, which takes every "
            "one once)"
        ),
    ),
    "a warm-up longer than a trial": (
        tune("warmup_tokens: {low: 0, high: 300_000}"),
        (
            "11:35: tune.fields.warmup_tokens.high: warmup_tokens 300000 exceeds the budget of "
            "200000 tokens (in 3 arms, first 'a')"
        ),
    ),
    "no evaluation in a trial": (
        tune(tokens=40_000),
        (
            "12:11: tune.tokens: eval_every_tokens 50000 exceeds the budget of 40000 tokens "
            "(training.eval_every_tokens: 40000 at most; in 3 arms, first 'a')"
        ),
    ),
    "a decay without its schedule": (
        tune("decay_tokens: {low: 0, high: 10_000}"),
        (
            "11:34: tune.fields.decay_tokens.high: decay_tokens 10000 with schedule constant (only wsd "
            "decays at the end; set decay_tokens: 0; in 3 arms, first 'a')"
        ),
    ),
    "trials longer than runs": (
        tune(tokens=500_000),
        (
            "12:11: tune.tokens: 500000 tokens a trial exceed the 400000 of a run (trials are shorter "
            "than runs; in arm 'a')"
        ),
    ),
    "an unknown arm": (
        tune(groups="{low: [b, d]}"),
        "14:21: tune.groups.low[1]: no arm 'd' (arms: a, b, c)",
    ),
    "an arm in two groups": (
        tune(groups="{low: [b, c], other: [c]}"),
        "14:33: tune.groups.other[0]: arm 'c' is in a group already ('low')",
    ),
    "a group with another arm's name": (
        tune(groups="{a: [b, c]}"),
        "14:12: tune.groups.a: an arm that is not in it is called 'a', too",
    ),
    "an arm that has a tuned arm's name": (
        tune().replace("  c:", "  a tuned:"),
        (
            "10:3: tune: an arm of the name 'a tuned' is there already ('a' at the values found for it "
            "takes that name)"
        ),
    ),
    "arms that differ in the tuned field alone": (
        tune().replace("c: {recipe: fp8}", "c: {recipe: bf16, training: {learning_rate: 2.0e-3}}"),
        (
            "10:3: tune.fields: arms 'a' and 'c' differ in nothing but what is tuned (tuned, they would "
            "be one arm)"
        ),
    ),
    "a group of arms that start apart": (
        tune(groups="{low: [b, c]}").replace("fp8}", "fp8, training: {learning_rate: 2.0e-3}}"),
        (
            "14:17: tune.groups.low: arms 'b' and 'c' of one group start from other values (give each a "
            "group of its own)"
        ),
    ),
    "more seeds than sense": (
        tune(seeds=1000),
        "14:10: tune.seeds: expected a number up to 100, got 1000",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(problems, fault):
    text, line = FAULTS[fault]
    assert problems(text) == [line]
