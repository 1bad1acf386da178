"""Token cost over other targets against crossings by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from synthetic_study import token_cost

from ablate.reports.findings.targets import move_target
from ablate.results.intervals import Method
from ablate.results.losses import Curve
from ablate.run.outcome import outcomes


def curve(seed, stretch=1.0, *, points=40, noise=0.0, end="hit"):
    tokens = np.arange(1, points + 1) * 1000
    rng = np.random.default_rng(seed)
    loss = 1.5 + 3.0 * (1 + tokens / stretch / 4000) ** -0.5
    loss += rng.normal(0, noise, points)
    return Curve(
        run_id=str(seed), arm="a", seed=seed, end=end, tokens=tokens, loss=loss
    )


def target_sweep(arm, base):
    found = move_target({"a": (arm, base)}, 0.0, Method(moderated=False)).get("a")
    return found and found.sweep


def test_a_stretched_axis_costs_the_same_at_every_target_and_a_lag_in_loss_more_and_more():
    paces = (1.0, 1.001, 1.002)
    base = [curve(0, pace) for pace in paces]
    sweep = target_sweep([curve(0, 1.2 * pace) for pace in paces], base)
    targets, costs = zip(*sweep, strict=True)
    assert len(targets) > 10
    assert np.all(np.diff(targets) < 0)
    # Interpolation is linear on a curve: off by a little, and by less where it is flat.
    assert np.allclose([cost.estimate for cost in costs], 0.2, atol=0.02)
    assert all(cost.low < cost.estimate < cost.high for cost in costs)
    assert {(cost.n, cost.n_baseline) for cost in costs} == {(3, 3)}
    lagging = target_sweep([replace(one, loss=one.loss + 0.05) for one in base], base)
    known = [cost.estimate for _, cost in lagging if cost.estimate is not None]
    assert known[-1] > 1.3 * known[len(known) // 3] > 0


def test_each_target_is_read_as_the_studys_own():
    arm = [curve(seed, 1.15, noise=0.004) for seed in (3, 4, 5)]
    base = [curve(seed, noise=0.004) for seed in (0, 1, 2)]
    sweep = target_sweep(arm, base)
    target, cost = sweep[len(sweep) // 2]
    ends = []
    for runs in (arm, base):
        outcomes_of_runs = [
            outcomes(
                seed=run.seed,
                tokens=run.tokens,
                loss=run.loss,
                targets=[target],
                rule="confirmed",
            )[0]
            for run in runs
        ]
        ends.append(outcomes_of_runs)
    assert cost == token_cost(*ends)


HIGH = replace(curve(1, points=3), loss=np.full(3, 9.0), end="censored")


@pytest.mark.parametrize(
    ("arm", "base"),
    [
        ([], [curve(0)]),
        ([curve(0, end="diverged")], [curve(1)]),
        ([curve(0)], [curve(1, end="diverged")]),
        ([curve(0, points=1)], [curve(1)]),
        ([curve(0)], [HIGH]),
        ([curve(0, end="missing")], [curve(1)]),
    ],
    ids=[
        "no run",
        "diverged",
        "diverged baseline",
        "one evaluation",
        "apart",
        "missing",
    ],
)
def test_no_sweep(arm, base):
    assert target_sweep(arm, base) is None


def test_runs_that_diverged_bound_the_cost_at_every_target():
    base = [curve(seed) for seed in range(3)]
    diverged = replace(curve(4), end="diverged", low=40_000)
    own = float(base[0].loss[20]) + 1e-3
    sides = {"a": ([diverged, curve(3, 1.1)], base), "b": (base, base)}
    found = move_target(sides, own, Method())
    moved = found["a"]
    assert own in moved.targets == found["b"].targets
    assert moved.sweep is None
    for ends, base_ends, cost in zip(
        moved.ends, moved.base_ends, moved.costs, strict=True
    ):
        assert diverged in ends
        assert cost == token_cost(ends, base_ends)
        assert cost.kind == "bound"
