"""Simulated studies with a known truth: how often the report's interval holds it, and how others fail.

    python benchmarks/simulated_studies.py [REPEATS]            # what the tables of docs/report.md have
    python benchmarks/simulated_studies.py 4000 claims          # those of statements on several arms alone

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
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ablate.reports.findings.effects import Design, averages
from ablate.reports.findings.speed import alone_speed
from ablate.results.change_rule import judge, level_in_loop
from ablate.results.claims import claims_together, may_be_least, p_values
from ablate.results.cost import NEAR_BUDGET, is_settled, token_costs
from ablate.results.intervals import (
    ALPHA,
    Method,
    contrasts,
    difference,
    exponential,
    mean_estimate,
    t_interval,
)
from ablate.results.stop_rule import decide, level_of, level_of_looks
from ablate.run.outcome import LocalFit, Outcome, outcome
from ablate.store.plan_file import Margin, Settled, StopRule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ablate.results.claims import Claim
    from ablate.results.cost import Cost
    from ablate.results.intervals import Interval
    from ablate.run.outcome import Rule

    Study = tuple[np.random.Generator, Sequence[Outcome], Sequence[Outcome]]

TARGET = 2.2
MARGIN = 0.05
THROUGHPUT, REPEATS, REPEAT_NOISE = 1.25, 6, 0.005
SEED_NOISE, EVAL_NOISE = 0.027, 0.002
OF_SEED, OF_PAIR, UNALIKE = 0.045, 0.035, 0.2
TOKENS_TO_TARGET = 20_000 * ((4.0 / (TARGET - 1.5)) ** (1 / 0.45) - 1)
EVERY = 0.077 * TOKENS_TO_TARGET


class Tally(NamedTuple):
    """Over the repeats: how often the interval held the truth and left zero out, and the mean error."""

    coverage: float
    positive: float
    bias: float
    spread: float


def tally(intervals: Iterable[Interval | Cost], truth: float) -> Tally:
    """Compare intervals and their estimates with the truth."""
    rows = [(one.low, one.high, one.estimate) for one in intervals]
    low, high, estimate = np.array(rows, dtype=float).T  # no interval holds nothing
    held, positive = (low <= truth) & (truth <= high), (low > 0) | (high < 0)
    return Tally(held.mean(), positive.mean(), estimate.mean() - truth, estimate.std())


def token_cost(
    arm: Sequence[Outcome],
    base: Sequence[Outcome],
    *,
    moderated: bool = True,
    **more: Any,
) -> Cost:
    """Compute the report's token cost of a study of two arms."""
    return token_costs({"arm": (arm, base)}, Method(moderated=moderated, **more))["arm"]


def studies(
    cost: float,
    n: int,
    repeats: int,
    *,
    budgets: tuple[float, float] = (1.6, 1.6),
    rule: Rule = "confirmed",
    seed: int = 0,
) -> Iterator[Study]:
    """Yield, of each study, its generator and the outcomes of ``n`` runs of an arm and of the baseline.

    ``budgets``: of the arm's and of the baseline's runs, over the baseline's true tokens to target.
    """
    rng = np.random.default_rng(seed)

    def run(number: int, cost: float, budget: float) -> Outcome:
        tokens = np.arange(EVERY, budget * TOKENS_TO_TARGET, EVERY)
        pace = np.exp(rng.normal(0, SEED_NOISE)) / (1 + cost)
        loss = (
            1.5
            + 4.0 * (1 + tokens * pace / 20_000) ** -0.45
            + rng.normal(0, EVAL_NOISE, len(tokens))
        )
        return outcome(seed=number, state="finished", tokens=tokens, loss=loss, target=TARGET, rule=rule,
                       budget_tokens=float(tokens[-1]))  # fmt: skip

    for _ in range(repeats):
        sides = zip((cost, 0.0), budgets, strict=True)
        yield rng, *([run(number, *side) for number in range(n)] for side in sides)


def by_report(
    cost: float,
    n: int,
    repeats: int,
    *,
    rule: Rule = "confirmed",
    seed: int = 0,
    moderated: bool = True,
) -> Tally:
    """Judge the report's token cost."""
    found = [
        token_cost(arm, base, moderated=moderated)
        for _, arm, base in studies(cost, n, repeats, rule=rule, seed=seed)
    ]
    # By first evaluations all runs may cross at the same one.
    assert rule == "first_eval" or {one.kind for one in found} == {"interval"}
    assert tally(found, cost).positive == np.mean([*map(is_settled, found)])
    return tally(found, cost)


def by_budget(
    cost: float, n: int, repeats: int, *, budget: float, seed: int = 0
) -> tuple[Tally, float, float]:
    """Judge the report's token cost where it has an interval: how often it has, and how often it says "near".

    ``budget``: over the arm's true tokens to target.
    """
    budget *= 1 + cost
    last = np.arange(EVERY, budget * TOKENS_TO_TARGET, EVERY)[-1]
    found, near = [], 0
    for _, arm, base in studies(cost, n, repeats, budgets=(budget, budget), seed=seed):
        own = token_cost(arm, base)
        if own.kind == "interval":
            found.append(own)
            near += max(run.high for run in (*arm, *base)) > (1 - NEAR_BUDGET) * last
    return tally(found, cost), len(found) / repeats, near / len(found)


def by_speed_up(
    cost: float, n: int, repeats: int, *, noise: float = REPEAT_NOISE, seed: int = 0
) -> Tally:
    """Judge the report's end-to-end speed-up, minus one, of an arm that was timed alone."""
    found = []
    for rng, arm, base in studies(cost, n, repeats, seed=seed):
        rates = (
            list(ratio * np.exp(rng.normal(0, noise, REPEATS)))
            for ratio in (THROUGHPUT, 1.0)
        )
        speed = alone_speed(*rates, cost=token_cost(arm, base), tokens=None).end_to_end
        found.append(speed.each(lambda value: value - 1))
    return tally(found, THROUGHPUT / (1 + cost) - 1)


def own_runs(
    rng: np.random.Generator,
    n: int,
    *,
    arms: int = 7,
    cost: float = 0.0,
    paired: bool = True,
    unalike: float = UNALIKE,
    odd: float = 1.0,
    odd_base: float = 1.0,
) -> tuple[list[np.ndarray], np.ndarray]:
    """Draw log tokens to target of each arm and of the baseline, by seed.

    ``odd``: how much more arm 0 spreads. ``odd_base``: how much more the baseline does, unpaired.
    """
    of_seed = rng.normal(0, OF_SEED, n)
    found = []
    for arm in range(arms + 1):
        spread = (
            OF_PAIR
            / 2**0.5
            * np.exp(rng.normal(0, unalike))
            * (odd if arm == 0 else 1.0)
        )
        shared = of_seed if paired else rng.normal(0, OF_SEED, n)
        found.append(
            shared + rng.normal(0, spread, n) + (np.log1p(cost) if arm < arms else 0.0)
        )
    return found[:-1], odd_base * found[-1]


def by_arms(
    n: int,
    repeats: int,
    *,
    paired: bool = True,
    moderated: bool = True,
    few: int | None = None,
    seed: int = 0,
    **runs: Any,
) -> tuple[float, float, float, float]:
    """Judge the intervals of log T of several arms.

    ``few``: arm 0 has so many of the ``n`` runs. Returns the share that holds the truth, the mean width, the
    share of arm 0's alone, and the cost that so many seeds find in four of five comparisons.
    """
    rng = np.random.default_rng(seed)
    ends = []
    for _ in range(repeats):
        own, base = own_runs(rng, n, paired=paired, **runs)
        own[0] = own[0][:few]
        sides = {
            arm: (list(enumerate(values)), list(enumerate(base)))
            for arm, values in enumerate(own)
        }
        found = contrasts(sides, Method(paired=paired, moderated=moderated)).values()
        ends.append(
            [
                (interval.low, interval.high)
                for interval in (t_interval(one.estimate) for one in found)
            ]
        )
    low, high = np.array(ends).transpose(2, 0, 1)
    held = (low <= 0) & (high >= 0)
    # An effect of so much would have put the lower end at zero.
    return (
        held.mean(),
        (high - low).mean(),
        held[:, 0].mean(),
        np.expm1(np.quantile(-low, 0.8)),
    )


def by_claims(
    costs: Sequence[float],
    n: int,
    repeats: int,
    *,
    claim: Claim = "differs",
    paired: bool = True,
    moderated: bool = True,
    seed: int = 0,
) -> np.ndarray:
    """Judge what is stated of several arms, each by itself and all together (a row each).

    The columns: the share of studies with any false statement, and the share of true ones that are made.
    """
    rng = np.random.default_rng(seed)
    method = Method(paired=paired, moderated=moderated)
    margin = Margin(kind="cost", value=MARGIN)
    is_within = np.array(costs) < MARGIN
    truth = {
        "differs": np.array(costs) != 0,
        "within": is_within,
        "outside": ~is_within,
    }
    shares = []
    for _ in range(repeats):
        own, base = own_runs(rng, n, arms=len(costs), paired=paired)
        sides = {}
        for arm, cost in enumerate(costs):
            sides[str(arm)] = (hits(own[arm] + np.log1p(cost)), hits(base))
        p = {
            arm: p_values(cost, None, margin)
            for arm, cost in token_costs(sides, method).items()
        }
        together = claims_together(p, lambda count: ALPHA / count)
        stated = np.array(
            [
                [values[claim] <= ALPHA for values in p.values()],
                [claim in claims for claims in together.values()],
            ]
        )
        true = truth[claim]
        shares.append(
            [
                (~true & stated).any(axis=1),
                (true & stated).sum(axis=1) / max(1, true.sum()),
            ]
        )
    return np.mean(shares, axis=0).T


def by_least(
    costs: Sequence[float], n: int, repeats: int, *, paired: bool = True, seed: int = 0
) -> np.ndarray:
    """Judge the arms that may be the least costly.

    Returns their mean number, how often the truly least is among them, how often all intervals hold, how
    often one alone is named, and how often another than the least is.
    """
    rng = np.random.default_rng(seed)
    truth = np.log1p(costs)
    least = int(truth.argmin())
    shares = []
    for _ in range(repeats):
        own, _ = own_runs(rng, n, arms=len(costs), paired=paired)
        values = [
            list(enumerate(arm + cost)) for arm, cost in zip(own, truth, strict=True)
        ]
        over = {}
        for rival, rival_values in enumerate(values):
            sides = {
                str(arm): (values[arm], rival_values)
                for arm in range(len(costs))
                if arm != rival
            }
            compared = contrasts(sides, Method(paired=paired))
            over[str(rival)] = {arm: pair.estimate for arm, pair in compared.items()}
        named = may_be_least(over, lambda count: ALPHA / count)
        holds = []
        for arm, interval in named.items():
            best_other = np.delete(truth, int(arm)).min()
            cost = np.expm1(truth[int(arm)] - best_other)
            holds.append(interval.low <= cost <= interval.high)
        is_single = len(named) == 1
        shares.append(
            [
                len(named),
                str(least) in named,
                all(holds),
                is_single,
                is_single and str(least) not in named,
            ]
        )
    return np.mean(shares, axis=0)


def by_settled(
    cost: float,
    repeats: int,
    *,
    moderated: bool = True,
    arms: int = 7,
    most: int = 8,
    paired: bool = True,
    seed: int = 0,
) -> tuple[float, float, float]:
    """Judge seeds until settled.

    Returns how often the last interval holds the truth, the mean of seeds, and the share of studies in which
    any arm is said to cost what it does not.
    """
    rng = np.random.default_rng(seed)
    rule = StopRule(settled=Settled(looks=tuple(range(2, most + 1))))
    method = Method(paired=paired, alpha=level_of(rule), moderated=moderated)
    held, used, wrong = [], [], []
    for _ in range(repeats):
        own, base = own_runs(rng, most, cost=cost, arms=arms, paired=paired)
        runs = {str(arm): hits(values) for arm, values in enumerate(own)}
        runs["base"] = hits(base)
        last = Outcome(seed=most - 1, end="missing")
        so_far = {arm: [*outcomes[:-1], last] for arm, outcomes in runs.items()}
        stopped = decide(so_far, rule, method, baseline="base").stopped
        seeds = dict.fromkeys(runs, most)
        seeds |= {arm: stop.seeds for arm, stop in stopped.items()}
        p = {}
        for n in {*seeds.values()}:
            sides = {
                arm: (outcomes[:n], runs["base"][:n])
                for arm, outcomes in runs.items()
                if arm != "base" and seeds[arm] >= n
            }
            for arm, found in token_costs(sides, method).items():
                if seeds[arm] == n:
                    held.append(found.low <= cost <= found.high)
                    used.append(n)
                    p[arm] = p_values(found, None, None)
        claims = claims_together(p, partial(level_of, rule))
        wrong.append(cost == 0 and any(claims.values()))
    return np.mean(held), np.mean(used), np.mean(wrong)


def hits(logs: np.ndarray) -> list[Outcome]:
    """Return runs that hit at these log tokens."""
    return [
        Outcome(seed=seed, end="hit", low=float(tokens), high=float(tokens))
        for seed, tokens in enumerate(np.exp(logs))
    ]


def by_try(
    cost: float,
    tries: int,
    *,
    seeds: int = 8,
    margin: float = 0.0,
    paired: bool = True,
    seed: int = 0,
) -> tuple[float, float, float, float]:
    """Judge ``ablate try``: the shares of keep, discard and undecided, and the mean of the change's seeds."""
    rng = np.random.default_rng(seed)
    looks = tuple(range(2, seeds + 1))
    method = Method(paired=paired, alpha=level_of_looks(looks, one_sided=True))
    decisions = []
    used = []
    for _ in range(tries):
        (change,), base = own_runs(rng, seeds, cost=cost, arms=1, paired=paired)
        judgement = judge((hits(change), hits(base)), looks, method, margin)
        decisions.append(judgement.decision)
        used.append(judgement.seeds)
    words = ("keep", "discard", "undecided")
    keep, discard, undecided = (decisions.count(word) / tries for word in words)
    return keep, discard, undecided, float(np.mean(used))


def by_loop(
    tries: int, loops: int, *, in_loop: bool, cost: float = 0.0, seed: int = 0
) -> float:
    """Return how often a loop of such tries against one baseline keeps at least one of them."""
    rng = np.random.default_rng(seed)
    looks = tuple(range(2, 9))
    kept = 0
    for _ in range(loops):
        changes, base = own_runs(rng, looks[-1], cost=cost, arms=tries)
        for number, change in enumerate(changes, 1):
            level = level_in_loop(number) if in_loop else ALPHA
            alpha = level_of_looks(looks, level, one_sided=True)
            method = Method(paired=True, alpha=alpha)
            if judge((hits(change), hits(base)), looks, method, 0.0).decision == "keep":
                kept += 1
                break
    return kept / loops


def by_estimator(
    repeats: int, *, every: float = 0.077, kink: float | None = None, seed: int = 0
) -> np.ndarray:
    """Return log tokens to target of single runs over the truth, a row each, by local fit and interpolated.

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
            found.append(
                np.log([run.fitted, run.interpolated]) - np.log(TOKENS_TO_TARGET)
            )
    return np.array(found)


def decayed_loss(tokens: np.ndarray, cost: float, begins: float) -> np.ndarray:
    """Return losses of a run whose rate falls from ``begins`` on, which takes 0.35 nats in 0.4 of T."""
    done = np.clip((tokens - begins) / (0.4 * TOKENS_TO_TARGET), 0, 1)
    steady = 1.5 + 4.0 * (1 + tokens / (1 + cost) / 20_000) ** -0.45
    return steady - 0.35 * (1 - (1 - done) ** 2)


def by_decay(
    share: float, cost: float, n: int, repeats: int, *, is_known: bool = True
) -> tuple[float, float, float]:
    """Return coverage, width and the share of bounds if the decay begins at ``share`` of T without it.

    ``is_known``: whether the report knows where it begins.
    """
    rng = np.random.default_rng(0)
    begins = share * TOKENS_TO_TARGET
    spans = [(0, begins)] if is_known else []
    fine = np.linspace(0.5, 1.6, 200_000) * TOKENS_TO_TARGET
    true_tokens = [
        fine[np.argmax(decayed_loss(fine, side_cost, begins) <= TARGET)]
        for side_cost in (cost, 0.0)
    ]
    truth = true_tokens[0] / true_tokens[1] - 1
    held = []
    widths = []
    bounds = 0
    for _ in range(repeats):
        sides: tuple[list[Outcome], list[Outcome]] = ([], [])
        for side, side_cost in zip(sides, (cost, 0.0), strict=True):
            for number in range(n):
                tokens = np.arange(EVERY * rng.uniform(0.5, 1.5), 1.6 * TOKENS_TO_TARGET, EVERY)  # fmt: skip
                loss = decayed_loss(tokens, side_cost, begins)
                loss += rng.normal(0, EVAL_NOISE, len(tokens))
                run = outcome(seed=number, state="finished", tokens=tokens, loss=loss, target=TARGET, rule="confirmed",
                              budget_tokens=float(tokens[-1]), fit=LocalFit(tokens, loss, spans))  # fmt: skip
                side.append(run)
        found = token_cost(*sides)
        held.append(found.low <= truth <= found.high)
        widths.append(found.high - found.low)
        bounds += found.kind == "bound"
    return float(np.mean(held)), float(np.mean(widths)), bounds / repeats


def by_naive_looks(cost: float, n: int, repeats: int, *, seed: int = 0) -> Tally:
    """Judge a plain 95 % interval after each seed from the second, stopped at the first sign of a cost."""
    found = []
    for _, arm, base in studies(cost, n, repeats, seed=seed):
        looks = [token_cost(arm[:used], base[:used]) for used in range(2, n + 1)]
        found.append(next((look for look in looks if look.low > 0), looks[-1]))
    return tally(found, cost)


def by_hits_only(
    cost: float, n: int, repeats: int, *, budget: float, seed: int = 0
) -> tuple[Tally, float]:
    """Judge the mean over the runs that reached the target, as if there were no others; and their share."""
    found, censored = [], 0
    for _, *sides in studies(cost, n, repeats, budgets=(budget, 1.6), seed=seed):
        logs = [
            [np.log(run.high) for run in runs if run.end == "hit"] for runs in sides
        ]
        censored += n - len(logs[0])
        if len(logs[0]) > 1:
            found.append(
                exponential(
                    t_interval(difference(*map(mean_estimate, logs))), minus=1.0
                )
            )
    return tally(found, cost), censored / (n * repeats)


def by_single_runs(
    cost: float, repeats: int, *, rule: Rule, seed: int = 0
) -> np.ndarray:
    """Return the estimates of one run an arm, for there is no interval."""
    pairs = studies(cost, 1, repeats, rule=rule, seed=seed)
    return np.array([arm.high / base.high - 1 for _, (arm,), (base,) in pairs])


def by_effects(n: int, repeats: int, *, seed: int = 0) -> np.ndarray:
    """Judge the average effects of three stabilisers over none in three places, none of which is real.

    Returns how often their intervals hold zero, their mean width, both of the intervals of a single pair, and
    how often the test says that the pairs differ.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(repeats):
        runs, _ = own_runs(rng, n, arms=12)
        logs = {str(arm): dict(enumerate(values)) for arm, values in enumerate(runs)}
        pairs = {
            word: [(str(4 * place), str(4 * place + word)) for place in range(3)]
            for word in (1, 2, 3)
        }
        row = []
        for count in (3, 1):
            designs = {
                word: Design(names[:count], logs) for word, names in pairs.items()
            }
            for interval in averages(designs, Method(paired=True)).values():
                row.append(interval.low <= 0 <= interval.high)
                row.append(interval.high - interval.low)
            if count == 3:
                row += [design.p_same() < 0.05 for design in designs.values()]
        rows.append(row)
    means = np.array(rows, dtype=float).mean(axis=0)
    average, single = means[:6].reshape(3, 2), means[9:].reshape(3, 2)
    return np.array([*average.mean(0), *single.mean(0), means[6:9].mean()])


EQUAL = (0.0,) * 8
HALF = (0.15,) * 4 + (0.0,) * 4
APART = tuple(0.01 * arm for arm in range(7))
CLAIMS = (
    (EQUAL, "differs"), ((0.08,) * 8, "differs"), (HALF, "differs"), ((MARGIN,) * 7, "within"),
    ((MARGIN,) * 7, "outside"), ((0.0,) * 7, "within"),
)  # fmt: skip
OF_OWN_RUNS = (
    {}, {"paired": False}, {"paired": False, "odd_base": 2.0}, {"paired": False, "odd_base": 3.0},
    {"paired": False, "arms": 1}, {"paired": False, "arms": 1, "odd_base": 3.0}, {"arms": 1}, {"odd": 2.0},
    {"odd": 3.0},
)  # fmt: skip


def say(simulate: Callable[..., object], *arguments: Any, **settings: Any) -> None:
    found = simulate(*arguments, **settings)
    figures = np.round(np.hstack([*found]), 4)
    print(simulate.__name__, arguments, settings, *figures, flush=True)


def say_claims(repeats: int) -> None:
    for (costs, claim), n, paired in product(CLAIMS, (2, 3, 5), (True, False)):
        say(by_claims, costs, n, repeats, claim=claim, paired=paired)
    for costs, n in product((EQUAL, APART, (0.0, *(0.05,) * 6)), (2, 3, 5)):
        say(by_least, costs, n, repeats // 2)
    for moderated in (True, False):
        say(by_settled, 0.0, repeats // 4, moderated=moderated)


def main(repeats: int) -> None:
    for moderated, cost, n in product((True, False), (0.0, 0.08), (3, 5, 10)):
        say(by_report, cost, n, repeats, moderated=moderated)
    say(by_report, 0.08, 5, repeats, rule="first_eval")
    for noise, n in product((REPEAT_NOISE, 0.03), (3, 5)):
        say(by_speed_up, 0.08, n, repeats, noise=noise)
    for cost, n in product((0.0, 0.08), (5, 10)):
        say(by_naive_looks, cost, n, repeats)
    say(by_hits_only, 0.08, 5, repeats, budget=1.10)
    for budget, n in product((1.0, 1.07, 1.21), (3, 5)):
        say(by_budget, 0.08, n, repeats, budget=budget)
    for rule in ("confirmed", "first_eval"):
        found = by_single_runs(0.08, repeats, rule=rule) - 0.08
        print(
            "by_single_runs",
            rule,
            np.mean(np.abs(found) > 0.04),
            found.mean(),
            found.std(),
        )
    for runs, n, moderated in product(OF_OWN_RUNS, (2, 3, 4, 5, 8), (True, False)):
        say(by_arms, n, repeats, moderated=moderated, **runs)
    for few, odd, arms in product((2, 3, 5), (1.0, 2.0, 3.0), (1, 7)):
        say(by_arms, 10, repeats, few=few, odd=odd, arms=arms, paired=False)
    say_claims(repeats)
    for more, cost in product(
        ({}, {"moderated": False}, {"arms": 1}), (0.0, 0.08, 0.15, 0.30)
    ):
        say(by_settled, cost, repeats // 4, **more)
    for seeds, cost in product((4, 8), (0.0, 0.05, -0.05)):
        say(by_try, cost, 1000, seeds=seeds)
    for cost in (0.03, 0.0):
        say(by_try, cost, 1000, margin=0.03)
    for cost in (0.0, -0.05):
        say(by_try, cost, 1000, paired=False)
    for in_loop in (False, True):
        share = by_loop(20, repeats // 2, in_loop=in_loop)
        print("by_loop: share with a try that is kept, of loops of 20", in_loop, share)
    for n in (2, 3, 5, 8):
        say(by_effects, n, repeats // 2)
    for share, is_known in product((0.85, 0.9, 0.95, 1.0, 1.05), (True, False)):
        say(by_decay, share, 0.08, 5, repeats // 4, is_known=is_known)
    for more in ({}, {"every": 0.02}, {"every": 0.25}, {"kink": 1.2}):
        found = by_estimator(repeats // 2, **more)
        print(
            "by_estimator: bias and s.d. of fit and crossing",
            more,
            found.mean(axis=0),
            found.std(axis=0),
        )


if __name__ == "__main__":
    simulate_all = say_claims if sys.argv[2:] == ["claims"] else main
    simulate_all(int(sys.argv[1]) if len(sys.argv) > 1 else 4000)
