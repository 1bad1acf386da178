"""A search's result for tests of its pages: two budgets, a front, runs of every end."""

from __future__ import annotations

from dataclasses import replace

from ablate.reports.findings.search import Rung, SearchResult, TrialPoint
from ablate.store.plan_file import DroppedCell

FACTORS = {
    "recipe.gemms": ("none", "F", "F+D"),
    "recipe.stabiliser": ("none", "sr", "dht"),
}
BAR = "pub|ished *odd* <b>$x$</b>"


def point(number, name, value, time, **more):
    gemms, _, stabiliser = name.partition(" ")
    values = {
        "recipe": f"recipe of {name}",
        "run_id": f"{number:016x}",
        "levels": {"recipe.gemms": gemms, "recipe.stabiliser": stabiliser or "–"},
        "started_from": name in ("bf16", BAR),
        "is_baseline": name == "bf16",
        "on_front": False,
        "end": "ok",
        "why": None,
    }
    return TrialPoint(
        number=number, name=name, value=value, modelled_time=time, **(values | more)
    )


def found_search(**more):
    first = (
        point(0, "bf16", 2.5, 1.0, on_front=True),
        point(
            1, BAR, 2.61, 0.7, levels={"recipe.gemms": "–", "recipe.stabiliser": "–"}
        ),
        point(2, "F none", 2.58, 0.85),
        point(3, "F sr", 2.54, 0.85, on_front=True),
        point(4, "F+D sr", 2.6, 0.7, on_front=True),
        point(5, "F+D none", 8.3, 0.7, end="diverged"),
        point(6, "F+D dht", None, 0.69, end="failed", why="ValueError: no <such> luck"),
    )
    second = (
        point(0, "bf16", 2.1, 1.0, on_front=True),
        point(1, "F sr", 2.12, 0.85, on_front=True),
        point(2, "F+D sr", 2.2, 0.7, on_front=True),
    )
    search = SearchResult(
        name="a search",
        description="Which <recipe> is best?",
        objective="loss",
        loss_unit="nats/token",
        hardware="B200",
        shapes="the shapes of Llama 3.1 8B",
        sampler="tpe",
        seed=1000,
        baseline="bf16",
        factors=FACTORS,
        rungs=(Rung(tokens=100_000, points=first), Rung(tokens=300_000, points=second)),
        importances={
            "loss": {"recipe.gemms": 0.7, "recipe.stabiliser": 0.3},
            "modelled_time": {"recipe.gemms": 1.0, "recipe.stabiliser": 0.0},
        },
        weighed=5,
        candidates=9,
        dropped=(
            DroppedCell(
                name="none sr", reason="stabiliser 'sr' with no FP4 GEMM to act on"
            ),
        ),
    )
    return replace(search, **more)
