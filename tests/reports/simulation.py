"""Simulated studies with a known truth: how often the report's interval holds it, and how others fail.

    python tests/reports/simulation.py [REPEATS]        # the table of docs/analysis.md

A run's loss is 1.5 + 4 (1 + T / 20,000)^−0.45 with its token axis stretched by the arm's cost and by a factor
of its own, log-normal: the noise of seeds (s.d. 2.7 %, as MLPerf's runs at batch 16 spread). Each evaluation
has noise of its own (0.002 nats), and there is one every 7.7 % of the tokens to target, as in MLPerf. Where
speed is simulated, every repeat of a timing has log-normal noise, too. Where arms are stopped early, there is
a look after each seed from the second, at which the arm is stopped if it is shown to cost anything at all
(``cost_above: 0``): the most tempting way to look.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from ablate.reports.findings.speed import alone_speed
from ablate.reports.statistics.cost import is_settled, token_cost
from ablate.reports.statistics.intervals import welch_interval
from ablate.reports.statistics.stopping import alpha_of, decide
from ablate.run.outcome import Outcome, outcome
from ablate.store.lock import Hopeless, StopRule

TARGET = 2.2
THROUGHPUT, REPEATS, REPEAT_NOISE = 1.25, 6, 0.005
SEED_NOISE, EVAL_NOISE = 0.027, 0.002
TOKENS_TO_TARGET = 20_000 * ((4.0 / (TARGET - 1.5)) ** (1 / 0.45) - 1)
EVERY = 0.077 * TOKENS_TO_TARGET


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Over the repeats: how often the interval held the truth and left zero out, and the mean error."""

    coverage: float
    positive: float
    bias: float
    spread: float


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


def by_report(cost, n, repeats, *, rule="confirmed", budget=1.6, seed=0):
    """The report's token cost."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(repeats):
        arm, base = ([run[rule] for run in study_of(rng, c, n, budget=budget)] for c in (cost, 0.0))
        found = token_cost(arm, base)
        if found.kind == "interval":
            assert is_settled(found) == ((found.low > 0) or (found.high < 0))
            rows.append((found.low, found.high, found.estimate))
        else:  # all runs crossed at the same evaluation: no interval, which holds nothing
            assert rule == "first_eval"
            rows.append((np.nan, np.nan, found.estimate))
    return _tally(rows, cost)


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


def by_stopping(cost, n, repeats, *, spending, cost_above=0.0, seed=0):
    """The report's token cost under a stop rule, and the share of the arm's seeds that were not run."""
    looks = tuple(range(2, n + 1))
    rule = StopRule(diverged=None, hopeless=Hopeless(cost_above=cost_above, spending=spending, looks=looks))
    rng = np.random.default_rng(seed)
    rows, saved = [], 0
    for _ in range(repeats):
        arm, base = ([run["confirmed"] for run in study_of(rng, c, n)] for c in (cost, 0.0))
        going_on = {"base": base, "arm": [*arm[:-1], Outcome(seed=n - 1, end="missing")]}
        stop = decide(going_on, rule, baseline="base").get("arm")
        used, alpha = (n, alpha_of(arm, base, rule, ended=True)) if stop is None else (stop.seeds, stop.alpha)
        found = token_cost(arm[:used], base[:used], alpha=alpha)
        saved += n - used
        rows.append((found.low, found.high, found.estimate))
    return _tally(rows, cost), saved / (n * repeats)


def by_naive_looks(cost, n, repeats, *, seed=0):
    """The same with a plain 95 % interval at each look."""
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
        found = welch_interval(hits, [np.log(run.high) for run in base])
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

    for cost in (0.0, 0.08):
        for n in (3, 5, 10):
            line("**the report**: confirmed crossing, Welch on logs", cost, n, by_report(cost, n, repeats))
    for noise in (REPEAT_NOISE, 0.03):
        for n in (3, 5):
            what = f"{THROUGHPUT}× the throughput, {REPEATS} repeats that spread by {noise:.1%}"
            line(f"**the speed-up**: {what}", 0.08, n, by_speed_up(0.08, n, repeats, noise=noise))
    for spending in ("obrien-fleming", "pocock"):
        for cost in (0.0, 0.08, 0.30):
            for n in (5, 10):
                tally, saved = by_stopping(cost, n, repeats, spending=spending)
                line(f"**early stops**, {spending}: {saved:.0%} of the arm's seeds saved", cost, n, tally)
    for cost in (0.0, 0.08):
        for n in (5, 10):
            tally, saved = by_naive_looks(cost, n, repeats)
            line(f"95 % intervals at every look, as if there were one ({saved:.0%} saved)", cost, n, tally)
    line("first evaluation, Welch on logs", 0.08, 5, by_report(0.08, 5, repeats, rule="first_eval"))
    tally, censored = by_hits_only(0.08, 5, repeats, budget=1.10)
    line(f"the hits alone ({censored:.0%} of the arm's runs censored)", 0.08, 5, tally)
    for rule in ("confirmed", "first_eval"):
        found = by_single_runs(0.08, repeats, rule=rule)
        what = "one run an arm, " + ("interpolated" if rule == "confirmed" else "first evaluation")
        far = np.mean(np.abs(found - 0.08) > 0.04)
        print(
            f"| {what} | 8% | 1 | no interval; {far:.0%} are off by more than 4 pp | – | "
            f"{100 * (found.mean() - 0.08):+.2f} pp | {100 * found.std():.1f} pp |"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4000)
