"""What a study may say of tuning, and the exact lines for what it may not."""

from __future__ import annotations

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
