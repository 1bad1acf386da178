from __future__ import annotations

import json
import re
from dataclasses import replace

import matplotlib as mpl
import pytest
from synthetic_study import analysed, line, lines

from ablate.reports import figures
from ablate.reports.figures import draw_figures
from ablate.reports.figures.canvas import SHADE, limits, looks, short


def test_looks_names_and_scales():
    seen = {
        (look["color"], str(look["linestyle"]))
        for look in looks(map(str, range(14)), "3").values()
    }
    assert len(seen) == 14
    assert short("a\x00b\nc" + "x" * 99) == f"a b c{'x' * 20}…"
    # All points, and the edges that are near.
    low, high = limits([0.0, 0.2], [0.3, -0.1, 9.0, float("nan")], least=0.05)
    assert -0.2 < low < -0.1 < 0.4 < high < 0.5


def figures_of(store):
    return {drawing.name: drawing for drawing in draw_figures(analysed(store))}


@pytest.mark.parametrize(
    "losses", [(3, 2.5, 2.2, 2.1), (3, 1.5, 1.2, 1.1), (3, 2.3, 1.9, 1.2)]
)
def test_the_enlarged_part_holds_the_target_and_no_divergence(make_study, losses):
    curves = {"a": [line(*losses), line(3, 9, 9, 9)]}
    store = make_study(curves, target={"value": 2.2}, states={("a", 1): "diverged"})
    low, high = figures_of(store)["convergence"].axes[1]["y"]
    assert low < 2.2 < high < 3.5


def test_the_same_study_gives_the_same_bytes_and_no_global_state(
    make_study, monkeypatch
):
    monkeypatch.undo()
    before = dict(mpl.rcParams)
    points = [line(3, 2.5, 2.2, 2.0), line(3, 2.4, 2.1, 2.0)]
    store = make_study({"$\\frac{": points, "b": points[::-1]}, target={"value": 2.3})
    first = figures_of(store)
    assert first == figures_of(store)
    assert dict(mpl.rcParams) == before
    assert all(drawing.png.startswith(b"\x89PNG") for drawing in first.values())


@pytest.mark.parametrize("decay", [150, 0])
def test_where_the_rate_falls_the_ground_is_grey(make_study, decay):
    store = make_study(
        lines("a: 3 2.5 2.3 2.1 1.9; b: 3.1 2.6 2.4 2.2 2.0"),
        training={
            "schedule": "wsd" if decay else "constant",
            "decay_tokens": decay,
            "tokens": 500,
        },
        target={"value": 2.4},
        model={"width": 64, "layers": 1},
    )
    drawn = figures_of(store)
    for name in ("convergence", "difference"):
        assert (SHADE.encode() in drawn[name].svg) == (decay > 0)
        assert ("from 350 tokens on" in drawn[name].caption) == (decay > 0)


def test_the_baseline_is_drawn_on_top_whatever_its_place(make_study):
    store = make_study(lines("a: 3 2; b: 3 2"), baseline="b")
    svg = figures_of(store)["convergence"].svg.decode()
    assert re.findall(r'id="(arm\d)-', svg)[-1] == "arm1"


def test_every_arm_is_named_in_every_figure(written):
    paths = written("wide")
    names = [arm["name"] for arm in json.loads(paths.json.read_text())["arms"]]
    for path in paths.figures.glob("*.svg"):
        # without a range in common
        text, apart = (path.read_text(), 2 if path.stem == "sweep" else 0)
        assert (
            sum(name not in text for name in names[path.stem != "convergence" :])
            == apart
        )


def test_of_very_many_arms_the_baseline_and_the_cheapest_are_drawn(ladder, monkeypatch):
    monkeypatch.setattr(figures, "_MOST_ARMS", 3)
    analysis = analysed(ladder)
    known = sorted(analysis.others, key=lambda arm: arm.token_cost.estimate)
    shown = figures.drawn_arms(analysis)
    assert {arm.name for arm in shown.arms} == {"bf16", known[0].name, known[1].name}
    left_out = "Not drawn: 3 arms of higher or unknown token cost."
    in_both = replace(analysis, curves_in_bf16=analysis.curves)
    assert all(left_out in drawing.caption for drawing in draw_figures(in_both))
