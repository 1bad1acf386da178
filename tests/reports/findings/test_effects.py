"""Average effects of factors: which pairs of arms make them, and their intervals, by scipy and by hand."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats
from synthetic_study import hits

from ablate.reports.findings.effects import find_effects
from ablate.reports.findings.gemms import find_cells, find_steps
from ablate.reports.words.effects import effect_sentence
from ablate.results.intervals import Method
from ablate.run.outcome import Outcome
from tests.reports.findings.test_gemms import configured, of

F, FD, FDW = ("fprop",), ("fprop", "dgrad"), ("fprop", "dgrad", "wgrad")
SEEDS = 5
SCALES = ("floor", "even", "rceil")


def effects_of(recipes, logs, differs=None, **method):
    """The effects of arms: recipes by name, log T by name (None: a run that missed the target)."""
    configs = {name: configured(recipe) for name, recipe in recipes.items()}
    arms = []
    for name in recipes:
        missed = Outcome(seed=0, end="censored", low=9.0)
        runs = [missed] if logs[name] is None else hits(*np.exp(logs[name]))
        planned = SimpleNamespace(
            name=name, again=False, differs=(differs or {}).get(name, {})
        )
        arm = SimpleNamespace(
            name=name, used=runs, counted_from=0, planned=planned, config=configs[name]
        )
        arms.append(arm)
    steps = find_steps(configs, lambda *_: None)
    found = find_effects(
        arms, find_cells(configs), steps, Method(paired=True, **method)
    )
    return {(effect.level, effect.over): effect for effect in found}


def noise(*names, seed=0):
    """Log T by name: what the runs of a seed share, and what they do not."""
    rng = np.random.default_rng(seed)
    shared = 13 + rng.normal(0, 0.05, SEEDS)
    return {name: (shared + rng.normal(0, 0.02, SEEDS)).tolist() for name in names}


def grid():
    recipes = {}
    for scale, word in itertools.product(SCALES, ("none", "sr", "dht", "rht")):
        recipes[f"{scale} {word}"] = of(*FDW, scale=scale, stabiliser=word)
    return recipes


def gaps_between(logs, word, over):
    """Return a row for each scale, a column for each seed."""
    return np.array(
        [
            np.subtract(logs[f"{scale} {word}"], logs[f"{scale} {over}"])
            for scale in SCALES
        ]
    )


def test_an_effect_is_the_mean_of_its_pairs_with_the_contrasts_own_moderated_t():
    recipes = grid()
    logs = noise(*recipes)
    gaps = {word: gaps_between(logs, word, "none") for word in ("sr", "rht", "dht")}
    variances = {word: gap.mean(axis=0).var(ddof=1) for word, gap in gaps.items()}
    effects = effects_of(recipes, logs)
    assert list(effects) == [
        ("SR", "none"), ("DHT", "none"), ("RHT", "none"), ("RHT", "DHT"),
    ]  # fmt: skip
    degrees = SEEDS - 1
    d0 = 3.0  # of three comparisons with eight degrees of freedom in the others
    for word, gap in gaps.items():
        effect = effects[word.upper(), "none"]
        pooled = np.mean(list(variances.values()))
        variance = (d0 * pooled + degrees * variances[word]) / (d0 + degrees)
        half = stats.t.ppf(0.975, d0 + degrees) * (variance / SEEDS) ** 0.5
        assert np.log1p([effect.estimate, effect.low, effect.high]) == pytest.approx(
            gap.mean() + np.array([0, -half, half])
        )
        # Two-way analysis of variance of pairs by seeds.
        residual = gap - gap.mean(0) - gap.mean(1, keepdims=True) + gap.mean()
        ratio = SEEDS * gap.mean(1).var(ddof=1) / ((residual**2).sum() / 8)
        assert effect.p_same == pytest.approx(stats.f.sf(ratio, 2, 8))
        assert (effect.n, len(effect.changes)) == (SEEDS, 3)
    own = effects_of(recipes, logs, moderated=False)["RHT", "DHT"]
    pairs = gaps_between(logs, "rht", "dht")
    interval = stats.ttest_1samp(np.mean(pairs, axis=0), 0).confidence_interval()
    assert np.log1p([own.low, own.high]) == pytest.approx(list(interval))


def test_two_pairs_are_told_apart_as_a_paired_t_test_does():
    recipes = {"bf16": of(), "f": of("fprop"), "d": of("dgrad"), "fd": of(*FD)}
    logs = noise(*recipes)
    effect = effects_of(recipes, logs)["fprop", "not in FP4"]
    first = np.subtract(logs["f"], logs["bf16"])
    second = np.subtract(logs["fd"], logs["d"])
    assert effect.p_same == pytest.approx(stats.ttest_rel(first, second).pvalue)


def test_pairs_that_share_an_arm_take_degrees_from_the_test():
    """Of arms without effects, at most about 5 % of the tests find a difference."""
    recipes = {"bf16": of(), "w": of("wgrad"), "fw": of("fprop", "wgrad")}
    for word in ("sr", "dht", "rht", "none"):
        recipes[f"f {word}"] = of("fprop", stabiliser=word)
    found = 0
    for seed in range(300):
        effects = effects_of(recipes, noise(*recipes, seed=seed))
        found += effects["fprop", "not in FP4"].p_same < 0.05
    assert found / 300 < 0.08


def test_only_arms_that_differ_in_one_factor_are_pairs():
    recipes = {
        "none 16": of(*FDW),
        "dht 16": of(*FDW, stabiliser="dht", hadamard_size=16),
        "dht 32": of(*FDW, stabiliser="dht", hadamard_size=32),
        "rht 16": of(*FDW, stabiliser="rht", hadamard_size=16),
        "rht 32": of(*FDW, stabiliser="rht", hadamard_size=32),
        "fixed": of(*FDW, stabiliser="rht", hadamard_size=16, signs="fixed"),
        "w 16": of(*FDW, wgrad={"stabiliser": "dht", "hadamard_size": 16}),
        "w 32": of(*FDW, wgrad={"stabiliser": "dht", "hadamard_size": 32}),
        "missed": of(*FDW, stabiliser="rht", hadamard_size=64),
    }
    logs = noise(*recipes) | {"missed": None}
    differs = {name: {"training.x": (1, 2)} for name in ("rht 16", "rht 32")}
    effects = effects_of(recipes, logs, differs)
    found = {}
    for (level, over), effect in effects.items():
        if over in ("none", "DHT"):
            pairs = [f"{pair.from_arm}, {pair.to_arm}" for pair in effect.pairs]
            found[f"{level} over {over}"] = pairs
    assert found == {
        "DHT over none": ["none 16, dht 16", "none 16, dht 32"],
        "RHT over none": ["none 16, rht 16", "none 16, rht 32", "none 16, missed"],
        "DHT on wgrad dy, wgrad x over none": ["none 16, w 16", "none 16, w 32"],
        "RHT over DHT": ["dht 16, rht 16", "dht 32, rht 32"],
    }
    assert "2" in {level for level, _ in effects}
    assert effect_sentence(effects["RHT", "none"]).endswith(
        "Left out, because not every run reached the target: none 16 → missed."
    )
