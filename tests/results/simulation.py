"""Simulated studies with a known truth: how often the report's interval holds it, and how others fail.

    python tests/results/simulation.py [REPEATS]        # the tables of docs/report.md

*Logs of others.* A run's loss is 1.5 + 4 (1 + T / 20,000)^−0.45 with its token axis stretched by the arm's
cost and by a factor of its own, log-normal: the noise of seeds (s.d. 2.7 %, as MLPerf's runs at batch 16
spread). Each evaluation has noise of its own (0.002 nats), and there is one every 7.7 % of the tokens to
target, as in MLPerf. Where speed is simulated, every repeat of a timing has log-normal noise, too.

*Our own runs.* Log tokens to target of seven arms and a baseline: what runs of one seed share (s.d. 4.5 %),
and what they do not (3.5 % between two of them), as in ``docs/findings``. Each arm's own spread is log-normal
about that (s.d. 0.2), because arms do not spread all alike.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from ablate.reports.findings.speed import alone_speed
from ablate.results.cost import NEAR_BUDGET, is_settled, token_costs
from ablate.results.intervals import contrasts, difference, mean_estimate, t_interval
from ablate.results.stop_rule import levels_of
from ablate.run.outcome import LocalFit, Outcome, outcome
from ablate.store.plan_file import Settled

TARGET = 2.2
THROUGHPUT, REPEATS, REPEAT_NOISE = 1.25, 6, 0.005
SEED_NOISE, EVAL_NOISE = 0.027, 0.002
OF_SEED, OF_PAIR, UNALIKE = 0.045, 0.035, 0.2
TOKENS_TO_TARGET = 20_000 * ((4.0 / (TARGET - 1.5)) ** (1 / 0.45) - 1)
EVERY = 0.077 * TOKENS_TO_TARGET


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Over the repeats: how often the interval held the truth and left zero out, and the mean error."""

    coverage: float
    positive: float
    bias: float
    spread: float


def token_cost(arm, base, *, moderated=True, **more):
    """The report's token cost of a study of two arms."""
    return token_costs({"arm": (arm, base)}, moderated=moderated, **more)["arm"]


def study_of(rng, cost, n, *, budget=1.6):
    """Return the outcomes of ``n`` runs, by the report's rule and by the first evaluation."""
    runs = []
    for seed in range(n):
        tokens = np.arange(EVERY, budget * TOKENS_TO_TARGET, EVERY)
        pace = np.exp(rng.normal(0, SEED_NOISE)) / (1 + cost)
        loss = 1.5 + 4.0 * (1 + tokens * pace / 20_000) ** -0.45 + rng.normal(0, EVAL_NOISE, len(tokens))
        runs.append(
            {
                rule: outcome(seed=seed, state="finished", tokens=tokens, loss=loss, target=TARGET, rule=rule,
                              budget_tokens=float(tokens[-1]))
                for rule in ("confirmed", "first_eval")
            }
        )  # fmt: skip
    return runs


def _tally(rows, cost):
    low, high, estimate = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    return Tally(
        coverage=float(np.mean((low <= cost) & (cost <= high))),
        positive=float(np.mean((low > 0) | (high < 0))),
        bias=float(np.mean(estimate) - cost),
        spread=float(np.std(estimate)),
    )


def by_report(cost, n, repeats, *, rule="confirmed", budget=1.6, seed=0, moderated=True):
    """The report's token cost."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(repeats):
        arm, base = ([run[rule] for run in study_of(rng, c, n, budget=budget)] for c in (cost, 0.0))
        found = token_cost(arm, base, moderated=moderated)
        if found.kind == "interval":
            assert is_settled(found) == ((found.low > 0) or (found.high < 0))
            rows.append((found.low, found.high, found.estimate))
        else:  # all runs crossed at the same evaluation: no interval, which holds nothing
            assert rule == "first_eval"
            rows.append((np.nan, np.nan, found.estimate))
    return _tally(rows, cost)


def by_budget(cost, n, repeats, *, budget, seed=0):
    """The report's token cost where it has an interval, how often it has, and how often it says "near".

    ``budget``: over the arm's true tokens to target.
    """
    rng = np.random.default_rng(seed)
    rows, near = [], 0
    budget *= 1 + cost
    last = np.arange(EVERY, budget * TOKENS_TO_TARGET, EVERY)[-1]
    for _ in range(repeats):
        arm, base = ([run["confirmed"] for run in study_of(rng, c, n, budget=budget)] for c in (cost, 0.0))
        found = token_cost(arm, base)
        if found.kind == "interval":
            rows.append((found.low, found.high, found.estimate))
            near += max(run.high for run in (*arm, *base)) > (1 - NEAR_BUDGET) * last
    return _tally(rows, cost), len(rows) / repeats, near / len(rows)


def by_speed_up(cost, n, repeats, *, noise=REPEAT_NOISE, seed=0):
    """The report's end-to-end speed-up, minus one, of an arm that was timed alone."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(repeats):
        arm, base = ([run["confirmed"] for run in study_of(rng, c, n)] for c in (cost, 0.0))
        rates = (list(ratio * np.exp(rng.normal(0, noise, REPEATS))) for ratio in (THROUGHPUT, 1.0))
        found = alone_speed(*rates, cost=token_cost(arm, base), tokens=None).end_to_end
        rows.append((found.low - 1, found.high - 1, found.estimate - 1))
    return _tally(rows, THROUGHPUT / (1 + cost) - 1)


def own_runs(rng, n, *, arms=7, cost=0.0, paired=True, unalike=UNALIKE, odd=1.0, odd_base=1.0):
    """Log tokens to target of each arm and of the baseline, by seed.

    ``odd``: how much more arm 0 spreads. ``odd_base``: how much more the baseline does, unpaired.
    """
    of_seed = rng.normal(0, OF_SEED, n)
    found = []
    for arm in range(arms + 1):
        spread = OF_PAIR / 2**0.5 * np.exp(rng.normal(0, unalike)) * (odd if arm == 0 else 1.0)
        shared = of_seed if paired else rng.normal(0, OF_SEED, n)
        found.append(shared + rng.normal(0, spread, n) + (np.log1p(cost) if arm < arms else 0.0))
    return found[:-1], odd_base * found[-1]


def by_arms(n, repeats, *, paired=True, moderated=True, seed=0, **runs):
    """Share of intervals of log T that hold the truth, mean width, and the share of arm 0's alone."""
    rng = np.random.default_rng(seed)
    held, widths, held_odd = [], [], []
    for _ in range(repeats):
        own, base = own_runs(rng, n, paired=paired, **runs)
        sides = {arm: (list(enumerate(values)), list(enumerate(base))) for arm, values in enumerate(own)}
        for arm, one in contrasts(sides, paired=paired, moderated=moderated).items():
            interval = t_interval(one.estimate)
            held.append(interval.low <= 0 <= interval.high)
            widths.append(interval.high - interval.low)
            if arm == 0:
                held_odd.append(held[-1])
    return float(np.mean(held)), float(np.mean(widths)), float(np.mean(held_odd))


def smallest_found(n, repeats, *, moderated=True, seed=0):
    """The cost that so many seeds find in four of five comparisons."""
    rng = np.random.default_rng(seed)
    needed = []
    for _ in range(repeats):
        own, base = own_runs(rng, n)
        sides = {arm: (list(enumerate(values)), list(enumerate(base))) for arm, values in enumerate(own)}
        found = contrasts(sides, paired=True, moderated=moderated).values()
        # An effect of so much would have put the lower end at zero.
        needed += [-t_interval(one.estimate).low for one in found]
    return float(np.expm1(np.quantile(needed, 0.8)))


def by_settled(cost, repeats, *, moderated=True, arms=7, most=8, paired=True, seed=0):
    """Seeds until settled: how often the last interval holds the truth, and the mean number of seeds."""
    rng = np.random.default_rng(seed)
    rule = Settled(looks=tuple(range(2, most + 1)))
    levels = dict(zip(rule.looks, levels_of(rule), strict=True))
    held, used = [], []
    for _ in range(repeats):
        own, base = own_runs(rng, most, cost=cost, arms=arms, paired=paired)
        runs = {arm: hits(values) for arm, values in enumerate(own)}
        for n, alpha in levels.items():
            sides = {arm: (outcomes[:n], hits(base)[:n]) for arm, outcomes in runs.items()}
            costs = token_costs(sides, paired=paired, alpha=alpha, moderated=moderated)
            for arm, found in costs.items():
                if is_settled(found) or n == most:
                    held.append(found.low <= cost <= found.high)
                    used.append(n)
                    del runs[arm]
            if not runs:
                break
    return float(np.mean(held)), float(np.mean(used))


def hits(logs):
    """Runs that hit at these log tokens."""
    return [
        Outcome(seed=seed, end="hit", low=float(tokens), high=float(tokens))
        for seed, tokens in enumerate(np.exp(logs))
    ]


def by_estimator(repeats, *, every=0.077, kink=None, seed=0):
    """Log tokens to target of single runs over the truth: a row each, by the local fit and interpolated.

    ``kink``: the share of the tokens to target after which the loss falls twice as fast, as in a decay that
    the fit was not told of.
    """
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(repeats):
        start = every * rng.uniform(0.5, 1.5)
        tokens = np.arange(start, 1.6, every) * TOKENS_TO_TARGET
        loss = 1.5 + 4.0 * (1 + tokens / 20_000) ** -0.45
        if kink is not None:
            at = kink * TOKENS_TO_TARGET
            slope = 4.0 * 0.45 / 20_000 * (1 + at / 20_000) ** -1.45
            loss -= slope * np.maximum(0, tokens - at)
        loss += rng.normal(0, EVAL_NOISE, len(tokens))
        run = outcome(seed=0, state="finished", tokens=tokens, loss=loss, target=TARGET, rule="confirmed",
                      budget_tokens=float(tokens[-1]), fit=LocalFit(tokens, loss, [(0, np.inf)]))  # fmt: skip
        if run.fitted is not None:
            found.append(np.log([run.fitted, run.interpolated]) - np.log(TOKENS_TO_TARGET))
    return np.array(found)


def by_naive_looks(cost, n, repeats, *, seed=0):
    """With a plain 95 % interval after each seed from the second, stopped at the first sign of a cost."""
    rng = np.random.default_rng(seed)
    rows, saved = [], 0
    for _ in range(repeats):
        arm, base = ([run["confirmed"] for run in study_of(rng, c, n)] for c in (cost, 0.0))
        for used in range(2, n + 1):
            found = token_cost(arm[:used], base[:used])
            if found.low > 0:
                break
        saved += n - used
        rows.append((found.low, found.high, found.estimate))
    return _tally(rows, cost), saved / (n * repeats)


def by_hits_only(cost, n, repeats, *, budget, seed=0):
    """The mean over the runs that reached the target, as if there were no others."""
    rng = np.random.default_rng(seed)
    rows, censored = [], 0
    for _ in range(repeats):
        arm, base = (
            [run["confirmed"] for run in study_of(rng, c, n, budget=b)]
            for c, b in ((cost, budget), (0.0, 1.6))
        )
        hits = [np.log(run.high) for run in arm if run.end == "hit"]
        censored += len(arm) - len(hits)
        if len(hits) < 2:
            continue
        logs = (hits, [np.log(run.high) for run in base])
        found = t_interval(difference(*map(mean_estimate, logs)))
        rows.append(tuple(np.expm1([found.low, found.high, found.estimate])))
    return _tally(rows, cost), censored / (n * repeats)


def by_single_runs(cost, repeats, *, rule, seed=0):
    """One run an arm: the estimates alone, for there is no interval."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(repeats):
        (arm,), (base,) = (study_of(rng, c, 1) for c in (cost, 0.0))
        found.append(arm[rule].high / base[rule].high - 1)
    return np.array(found)


def main(repeats):
    print("| what is done | true cost | seeds | holds the truth | leaves zero out | mean error | s.d. |")
    print("|---|---|---|---|---|---|---|")

    def line(what, cost, n, tally):
        print(
            f"| {what} | {cost:.0%} | {n} | {tally.coverage:.1%} | {tally.positive:.1%} | "
            f"{100 * tally.bias:+.2f} pp | {100 * tally.spread:.1f} pp |"
        )

    for moderated in (True, False):
        for cost in (0.0, 0.08):
            for n in (3, 5, 10):
                what = "**the report**: moderated" if moderated else "`intervals: own`, Welch's"
                line(what, cost, n, by_report(cost, n, repeats, moderated=moderated))
    for noise in (REPEAT_NOISE, 0.03):
        for n in (3, 5):
            what = f"{THROUGHPUT}× the throughput, {REPEATS} repeats that spread by {noise:.1%}"
            line(f"**the speed-up**: {what}", 0.08, n, by_speed_up(0.08, n, repeats, noise=noise))
    for cost in (0.0, 0.08):
        for n in (5, 10):
            tally, saved = by_naive_looks(cost, n, repeats)
            line(f"95 % intervals at every look, as if there were one ({saved:.0%} saved)", cost, n, tally)
    line("first evaluation, Welch on logs", 0.08, 5, by_report(0.08, 5, repeats, rule="first_eval"))
    tally, censored = by_hits_only(0.08, 5, repeats, budget=1.10)
    line(f"the hits alone ({censored:.0%} of the arm's runs censored)", 0.08, 5, tally)
    for budget in (1.0, 1.07, 1.21):
        for n in (3, 5):
            tally, given, near = by_budget(0.08, n, repeats, budget=budget)
            what = (
                f"a budget of {budget} T: {given:.0%} have an interval, {near:.0%} of these near the budget"
            )
            line(what, 0.08, n, tally)
    for rule in ("confirmed", "first_eval"):
        found = by_single_runs(0.08, repeats, rule=rule)
        what = "one run an arm, " + ("interpolated" if rule == "confirmed" else "first evaluation")
        far = np.mean(np.abs(found - 0.08) > 0.04)
        print(
            f"| {what} | 8% | 1 | no interval; {far:.0%} are off by more than 4 pp | – | "
            f"{100 * (found.mean() - 0.08):+.2f} pp | {100 * found.std():.1f} pp |"
        )


def main_own(repeats):
    print("\n| seven arms | seeds | moderated holds | its width | own holds | its width |")
    print("|---|---|---|---|---|---|")
    for what, more in (
        ("paired", {}),
        ("unpaired", {"paired": False}),
        ("unpaired, a baseline of twice the spread", {"paired": False, "odd_base": 2.0}),
        ("unpaired, a baseline of three times the spread", {"paired": False, "odd_base": 3.0}),
        ("unpaired, one arm alone", {"paired": False, "arms": 1}),
        (
            "unpaired, one arm, a baseline of three times the spread",
            {"paired": False, "arms": 1, "odd_base": 3.0},
        ),
        ("paired, one arm alone", {"arms": 1}),
        ("paired, an arm of twice the spread, itself", {"odd": 2.0}),
        ("paired, an arm of three times the spread, itself", {"odd": 3.0}),
    ):
        for n in (2, 3, 5):
            cells = []
            for moderated in (True, False):
                held, width, held_odd = by_arms(n, repeats, moderated=moderated, **more)
                cells += [f"{held_odd if 'odd' in more else held:.1%}", f"{100 * width:.1f}"]
            print(f"| {what} | {n} | {' | '.join(cells)} |")
    print("\n| seeds | cost found in 4 of 5 comparisons, moderated | own |")
    print("|---|---|---|")
    for n in (2, 3, 4, 5, 8):
        both = (smallest_found(n, repeats // 2, moderated=moderated) for moderated in (True, False))
        print(f"| {n} | {' | '.join(f'{cost:.1%}' for cost in both)} |")
    print("\n| seeds until settled, 2 to 8 | true cost | holds the truth | seeds |")
    print("|---|---|---|---|")
    for what, more in (("moderated", {}), ("own", {"moderated": False}), ("one arm alone", {"arms": 1})):
        for cost in (0.0, 0.08, 0.15, 0.30):
            held, used = by_settled(cost, repeats // 4, **more)
            print(f"| {what} | {cost:.0%} | {held:.1%} | {used:.1f} |")
    print("\n| one run's tokens to target | bias, fit | s.d., fit | bias, crossing | s.d., crossing |")
    print("|---|---|---|---|---|")
    for what, more in (
        ("an evaluation every 7.7 %", {}),
        ("every 2 %", {"every": 0.02}),
        ("every 25 %", {"every": 0.25}),
        ("every 7.7 %, a decay from 1.2 T on that is not known", {"kink": 1.2}),
    ):
        rows = 100 * by_estimator(repeats // 2, **more)
        cells = [f"{f(column):+.2f} %" for column in rows.T for f in (np.mean, np.std)]
        print(f"| {what} | {' | '.join(cells)} |")


if __name__ == "__main__":
    REPEATS_ASKED = int(sys.argv[1]) if len(sys.argv) > 1 else 4000
    main(REPEATS_ASKED)
    main_own(REPEATS_ASKED)
