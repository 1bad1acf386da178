from __future__ import annotations

import json
import re

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from synthetic_study import line

from ablate.reports import figures
from ablate.reports.figures import draw_figures
from ablate.reports.figures.canvas import SHADE, looks, shade_decay, short, spread
from ablate.reports.figures.convergence import _window
from ablate.reports.figures.sweep import _falling
from ablate.reports.findings.analyse import analyse
from ablate.results.frames import load_frames
from ablate.results.losses import common_grid


@given(st.lists(st.floats(0, 1), min_size=1, max_size=14))
def test_labels_keep_their_distance_and_their_order(places):
    gap = 0.05
    moved = spread(places, gap, 0.0, 1.0)
    assert min(moved) >= -1e-9
    assert max(moved) <= 1 + 1e-9
    order = np.argsort(places, kind="stable")
    steps = np.diff(np.array(moved)[order])
    assert (steps >= gap - 1e-9).all()


def test_labels_that_have_room_stay_where_they_are():
    assert spread([0.9, 0.1, 0.5], 0.1, 0, 1) == pytest.approx([0.9, 0.1, 0.5])


def test_more_labels_than_room_share_it():
    assert spread([0.5] * 3, 0.9, 0.0, 1.0) == pytest.approx([0.0, 0.5, 1.0])


def test_fourteen_arms_look_different():
    names = [f"arm{i}" for i in range(14)]
    seen = {(look.color, str(look.dash)) for look in looks(names, "arm3").values()}
    assert len(seen) == 14


def test_names_are_cut_and_cleaned():
    assert short("a\x00b\nc") == "a b c"
    assert len(short("x" * 99)) == 26


@pytest.mark.parametrize("losses", [(3, 2.5, 2.2, 2.1), (3, 1.5, 1.2, 1.1), (3, 2.3, 1.9, 1.2)])
def test_the_enlarged_part_holds_the_crossing(make_study, losses):
    analysis = analyse(load_frames(make_study({"a": [line(*losses)] * 2}, target={"value": 2.2})))
    curves = list(analysis.curves)
    window = _window(analysis, curves, {"a": common_grid(curves)})
    reached = analysis.arms[0].tokens_to_target.estimate
    assert window.low < 2.2 < window.high
    assert window.start < reached < window.end


def test_a_run_that_diverged_does_not_set_the_scale(wide):
    analysis = analyse(load_frames(wide))
    curves = list(analysis.curves)
    grids = {a.name: common_grid([c for c in curves if c.arm == a.name]) for a in analysis.arms}
    assert _window(analysis, curves, grids).high < 2.5


def figures_of(store):
    return {drawing.name: drawing for drawing in draw_figures(analyse(load_frames(store)))}


def test_the_same_study_gives_the_same_bytes_and_no_global_state(make_study, monkeypatch):
    monkeypatch.undo()
    before = dict(mpl.rcParams)
    points = [line(3, 2.5, 2.2, 2.0), line(3, 2.4, 2.1, 2.0)]
    store = make_study({"a": points, "b": points[::-1]}, target={"value": 2.3})
    first, second = figures_of(store), figures_of(store)
    assert set(first) == {"token-cost", "convergence", "difference", "sweep"}
    for name, drawing in first.items():
        assert drawing.svg == second[name].svg
        assert drawing.png == second[name].png
        assert len(drawing.png) > 10_000
        assert drawing.png.startswith(b"\x89PNG")
        assert "n" in drawing.caption
        assert drawing.alt
    assert dict(mpl.rcParams) == before


def test_the_grey_ground_begins_where_the_rate_falls_and_moves_no_limit():
    axis = Figure().subplots()
    for limits, begins, expected in [
        ((0, 10), 4, [(4, 10)]),
        ((6, 10), 4, [(6, 10)]),
        ((0, 10), 12, []),
        ((0, 10), None, []),
    ]:
        axis.clear()
        axis.set_xlim(*limits)
        shade_decay(axis, begins)
        assert [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in axis.patches] == expected
        assert axis.get_xlim() == limits


@pytest.mark.parametrize(("decay", "grey"), [(150, True), (0, False)])
def test_where_the_rate_falls_the_ground_is_grey(make_study, decay, grey):
    base, arm = line(3, 2.5, 2.3, 2.1, 1.9), line(3.1, 2.6, 2.4, 2.2, 2.0)
    schedule = {"schedule": "wsd", "decay_tokens": decay} if decay else {"schedule": "constant"}
    store = make_study(
        {"a": [base, base], "b": [arm, arm]},
        training=schedule | {"tokens": 500},
        target={"value": 2.4},
        model={"width": 64, "layers": 1},
    )
    drawn = figures_of(store)
    for name in ("convergence", "difference", "sweep"):
        assert (SHADE.encode() in drawn[name].svg) == grey
        assert ("from 350 tokens on" in drawn[name].caption) == grey
    assert "Grey ground" not in drawn["token-cost"].caption


@pytest.mark.parametrize(
    ("arm", "grey"),
    [
        ((3.3, 3.0, 2.8, 2.6, 2.5), ["b"]),  # meets 2.55 in its decay, where the baseline met it before
        ((3.3, 3.0, 2.8, 2.6, 2.6), []),
    ],
)
def test_a_sweep_is_grey_where_either_of_the_two_is_in_its_decay(make_study, arm, grey):
    base = line(3.2, 2.9, 2.7, 2.55, 2.2)
    store = make_study(
        {"a": [base, base], "b": [line(*arm)] * 2},
        training={"schedule": "wsd", "decay_tokens": 100, "tokens": 500},
        target={"value": 2.75},
        model={"width": 64, "layers": 1},
    )
    analysis = analyse(load_frames(store))
    falls = _falling(analysis, {one.name: one.sweep for one in analysis.others})
    assert falls == dict.fromkeys(grey, 2.6)
    drawn = figures_of(store)
    assert ("Grey ground" in drawn["sweep"].caption) == bool(grey)
    assert (SHADE.encode() in drawn["sweep"].svg) == bool(grey)
    assert "Grey ground" in drawn["difference"].caption


def test_every_arm_is_named_in_every_figure(written):
    paths = written("wide")
    names = [arm["name"] for arm in json.loads(paths.json.read_text())["arms"]]
    (apart,) = re.findall("No range in common, or diverged: (.*)\\.\n", paths.markdown.read_text())
    assert apart == "F+D+W SR, F+D+W RHT16"  # of which the sweep's caption speaks instead
    for path in paths.figures.glob("*.svg"):
        for arm in names if path.stem == "convergence" else names[1:]:
            assert f">{arm}" in path.read_text() or (path.stem == "sweep" and arm in apart), (path, arm)


def test_formulas_and_markup_in_names_are_drawn_as_they_are(make_study):
    store = make_study({"$\\frac{": [line(3, 1), line(3, 1.1)], "<b>&": [line(3, 1.2), line(3, 1.3)]})
    for drawing in figures_of(store).values():
        text = drawing.svg.decode()
        assert "<b>" not in text
        assert "&lt;b>&amp;" in text or "&lt;b&gt;&amp;" in text


@pytest.mark.parametrize(
    ("curves", "drawn"),
    [
        ({"a": [[]], "b": [[]]}, set()),
        ({"a": [line(3)], "b": [line(3)]}, {"convergence", "difference"}),
        ({"a": [line(3, 3, 3)], "b": [line(3, 3, 3)]}, {"convergence", "difference"}),
        ({"a": [line(3, 1)]}, {"convergence"}),
        ({"a": [line(1, 2, 3)], "b": [line(1, 1, 1)]}, {"convergence", "difference"}),
        ({"a": [line(3, 1)], "b": [[(150, 3.0), (250, 1.0)]]}, {"convergence", "token-cost", "sweep"}),
        (
            {"a": [line(1e-3, 1e6)], "b": [line(1e6, 1e-3)]},
            {"convergence", "difference", "token-cost", "reached"},
        ),
    ],
    ids=["nothing", "one point", "constant", "one arm", "rising", "no common tokens", "huge"],
)
def test_strange_curves_are_drawn_or_left_out(make_study, curves, drawn, recwarn):
    assert set(figures_of(make_study(curves, target={"value": 2.0}))) == drawn
    assert [str(warning.message) for warning in recwarn] == []


def test_of_very_many_arms_the_baseline_and_the_cheapest_are_drawn(ladder, monkeypatch):
    monkeypatch.setattr(figures, "_MOST_ARMS", 3)
    analysis = analyse(load_frames(ladder))
    known = {arm.name: arm.token_cost.estimate for arm in analysis.others}
    costs = {name: cost for name, cost in known.items() if cost is not None}
    cheapest = sorted(costs, key=costs.get)[:2]
    drawings = draw_figures(analysis)
    left_out = f"Not drawn: {len(analysis.arms) - 3} arms of higher or unknown token cost."
    assert all(left_out in drawing.caption for drawing in drawings)
    forest = drawings[0].svg.decode()
    assert all(name in forest for name in cheapest)
    assert not any(f">{name}<" in forest for name in costs if name not in cheapest)
