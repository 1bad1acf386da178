"""How often a comparison tells the truth, at one learning rate for all arms and at one tuned for each.

The trainer is synthetic: its loss falls with tokens at a pace that drops with the distance of the learning
rate from the arm's own optimum, so that the true token cost at the optima is known. The search and the
analysis are the tool's own.

python benchmarks/tuning.py [--repeats 20] [--trials 8] [--seeds 5]        prints a Markdown table
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import optuna

from ablate.results.cost import Cost, token_costs
from ablate.results.intervals import Method
from ablate.run.outcome import Outcome, outcome
from ablate.search.engine import Asked, TrialGroup, TrialResult, open_study, search
from ablate.search.tune import best_trial, propose_values
from ablate.study.search_space import Range

BUDGET, TRIAL, EVERY = 1_000_000, 250_000, 25_000
TARGET = 2.15
SHARED = 2e-3
SPACE = {"learning_rate": Range(low=5e-4, high=1.6e-2, log=True)}
FALL = 0.08
"""Drop of the pace (log) for a rate that is an octave from the optimum; it grows with the square."""
SEED_NOISE, EVAL_NOISE = 0.02, 0.002


@dataclass(frozen=True, kw_only=True)
class Arm:
    """An arm of the synthetic trainer: its best rate, and its token cost there."""

    name: str
    best_rate: float
    cost: float = 0.0


BASELINE = Arm(name="baseline", best_rate=2e-3)
CASES = {
    "no cost, best rate 3 times lower": Arm(name="arm", best_rate=2e-3 / 3),
    "no cost, best rate 3 times higher": Arm(name="arm", best_rate=2e-3 * 3),
    "cost 10 %, best rate 4 times higher": Arm(name="arm", best_rate=8e-3, cost=0.10),
    "cost 10 %, the same best rate": Arm(name="arm", best_rate=2e-3, cost=0.10),
    "no cost, the same best rate": Arm(name="arm", best_rate=2e-3),
}


def train(arm: Arm, rate: float, seed: str, budget: int) -> dict[int, float]:
    """Return the validation losses of a run, by tokens."""
    draw = random.Random(f"{arm.name} {rate} {seed}")
    octaves = math.log2(rate / arm.best_rate)
    pace = math.exp(draw.gauss(0, SEED_NOISE) - FALL * octaves**2) / (1 + arm.cost)
    return {
        tokens: 1.3
        + 4 * (1 + tokens * pace / 20_000) ** -0.45
        + draw.gauss(0, EVAL_NOISE)
        for tokens in range(EVERY, budget + 1, EVERY)
    }


def tune(arms: list[Arm], trials: int, repeat: int) -> dict[str, float]:
    """Return the rate found for each arm."""
    storage = optuna.storages.InMemoryStorage()
    by_name = {arm.name: arm for arm in arms}
    tuning: Any = SimpleNamespace(fields=SPACE, sampler="tpe", seeds=(repeat,))
    groups = [
        TrialGroup(
            name=arm.name,
            study=open_study(storage, arm.name),
            propose=partial(propose_values, tuning, {"learning_rate": SHARED}),
            arms=lambda _: [],
            num_trials=trials,
            watched_from=TRIAL // 3,
        )
        for arm in arms
    ]

    def run(asked: list[Asked]) -> list[TrialResult]:
        results = []
        for trial in asked:
            curve: dict[int, float] = {}
            rate = trial.trial.params["learning_rate"]
            for tokens, loss in train(
                by_name[trial.group.name], rate, f"trial {repeat}", TRIAL
            ).items():
                curve[tokens] = loss
                if trial.hopeless_at(curve) is not None:
                    break
            values = (curve[TRIAL],) if TRIAL in curve else None
            results.append(TrialResult(values=values, violation=0.0, curve=curve))
        return results

    assert search(groups, 2, run)
    found = {}
    for group in groups:
        best = best_trial(group.study.get_trials())
        assert best is not None
        found[group.name] = best.params["learning_rate"]
    return found


def compare(arm: Arm, rates: dict[str, float], seeds: int, repeat: int) -> Cost:
    """Return the token cost of an arm as the report reckons it."""

    def outcomes(one: Arm) -> list[Outcome]:
        ends = []
        for seed in range(seeds):
            curve = train(one, rates[one.name], f"{repeat}/{seed}", BUDGET)
            ends.append(
                outcome(
                    seed=seed,
                    state="finished",
                    tokens=list(curve),
                    loss=list(curve.values()),
                    target=TARGET,
                    rule="confirmed",
                    budget_tokens=BUDGET,
                )
            )
        return ends

    return token_costs(
        {"": (outcomes(arm), outcomes(BASELINE))}, Method(moderated=False)
    )[""]


def holds(cost: Cost, truth: float) -> bool:
    """Tell whether an interval holds the truth."""
    return (
        cost.low is not None
        and cost.high is not None
        and cost.low <= truth <= cost.high
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    print(
        "| case | true cost | at one rate, mean | interval holds the truth | tuned, mean | "
        "interval holds the truth | best rate missed by, octaves |"
    )
    print("|---|---|---|---|---|---|---|")
    for case, arm in CASES.items():
        shared, tuned, off = [], [], []
        for repeat in range(options.repeats):
            rates = tune([BASELINE, arm], options.trials, repeat)
            off += [
                abs(math.log2(rates[one.name] / one.best_rate))
                for one in (BASELINE, arm)
            ]
            same = dict.fromkeys(rates, SHARED)
            shared.append(compare(arm, same, options.seeds, repeat))
            tuned.append(compare(arm, rates, options.seeds, repeat))
        cells = [case, f"{arm.cost:+.0%}"]
        for costs in (shared, tuned):
            mean = statistics.fmean(
                cost.estimate for cost in costs if cost.estimate is not None
            )
            cells += [
                f"{mean:+.1%}",
                f"{sum(holds(one, arm.cost) for one in costs)} of {len(costs)}",
            ]
        print(f"| {' | '.join(cells)} | {statistics.fmean(off):.2f} |")


if __name__ == "__main__":
    main()
