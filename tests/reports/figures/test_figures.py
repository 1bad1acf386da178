from __future__ import annotations

import json
from dataclasses import replace

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure
from synthetic_study import line

from ablate.reports import figures
from ablate.reports.figures import draw_figures, forest
from ablate.reports.figures.canvas import SHADE, limits, looks, shade_decay, short
from ablate.reports.figures.convergence import _window
from ablate.reports.findings.analyse import analyse
from ablate.results.cost import Cost
from ablate.results.frames import load_frames


def test_fourteen_arms_look_different():
    seen = {(look["color"], str(look["linestyle"])) for look in looks(map(str, range(14)), "3").values()}
    assert len(seen) == 14


def test_names_are_cut_and_cleaned():
    assert short("a\x00b\nc") == "a b c"
    assert len(short("x" * 99)) == 26


def test_a_scale_holds_all_points_and_the_edges_that_are_near():
    low, high = limits([0.0, 0.2], [0.3, -0.1, 9.0, float("nan")], least=0.05)
    assert -0.2 < low < -0.1
    assert 0.4 < high < 0.5


@pytest.mark.parametrize("losses", [(3, 2.5, 2.2, 2.1), (3, 1.5, 1.2, 1.1), (3, 2.3, 1.9, 1.2)])
def test_the_enlarged_part_holds_the_target(make_study, losses):
    analysis = analyse(load_frames(make_study({"a": [line(*losses)] * 2}, target={"value": 2.2})))
    low, high = _window(analysis.curves, 200, 2.2)
    assert low < 2.2 < high


def test_a_run_that_diverged_does_not_set_the_scale(wide):
    assert _window(analyse(load_frames(wide)).curves, 600_000, 2.09)[1] < 2.5


def figures_of(store):
    return {drawing.name: drawing for drawing in draw_figures(analyse(load_frames(store)))}


def test_the_same_study_gives_the_same_bytes_and_no_global_state(make_study, monkeypatch):
    monkeypatch.undo()
    before = dict(mpl.rcParams)
    points = [line(3, 2.5, 2.2, 2.0), line(3, 2.4, 2.1, 2.0)]
    store = make_study({"a": points, "b": points[::-1]}, target={"value": 2.3})
    first, second = figures_of(store), figures_of(store)
    assert first == second
    assert set(first) == {"token-cost", "convergence", "difference", "sweep"}
    for drawing in first.values():
        assert drawing.png.startswith(b"\x89PNG")
        assert len(drawing.png) > 10_000
        assert drawing.caption
        assert drawing.alt
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize(
    ("limits", "begins", "grey"),
    [((0, 10), 4, [(4, 10)]), ((6, 10), 4, [(6, 10)]), ((0, 10), 12, []), ((0, 10), None, [])],
)
def test_the_grey_ground_begins_where_the_rate_falls_and_moves_no_limit(limits, begins, grey):
    axis = Figure().subplots()
    axis.set_xlim(*limits)
    shade_decay(axis, begins)
    assert [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in axis.patches] == grey
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


def test_every_arm_is_named_in_every_figure(written):
    paths = written("wide")
    names = [arm["name"] for arm in json.loads(paths.json.read_text())["arms"]]
    apart = ("F+D+W SR", "F+D+W RHT16")
    assert f"No range in common, or diverged: {', '.join(apart)}." in paths.markdown.read_text()
    for path in paths.figures.glob("*.svg"):
        for arm in names if path.stem == "convergence" else names[1:]:
            assert arm in path.read_text() or (path.stem == "sweep" and arm in apart), (path, arm)


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
    known = sorted(analysis.others, key=lambda arm: arm.token_cost.estimate)
    shown = figures.drawn_arms(analysis)
    assert {arm.name for arm in shown.arms} == {"bf16", known[0].name, known[1].name}
    in_both = replace(analysis, curves_in_bf16=analysis.curves)
    left_out = f"Not drawn: {len(analysis.arms) - 3} arms of higher or unknown token cost."
    assert all(left_out in drawing.caption for drawing in draw_figures(in_both))


def test_an_interval_beyond_the_scale_ends_in_an_arrow():
    look = {"color": "k", "marker": "s"}
    costs = [Cost(kind="interval", estimate=0.1, low=low, high=high) for low, high in ((0, 0.2), (-9, 9))]
    _, axis = forest._draw(["a", "b"], [(row, one, look, "") for row, one in enumerate(costs)], "cost")
    arrows = [(line.get_ydata()[0], line.get_marker()) for line in axis.lines if line.get_marker() in "<>"]
    assert arrows == [(1, "<"), (1, ">")]
