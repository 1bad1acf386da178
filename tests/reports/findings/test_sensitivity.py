"""Final loss over the learning rate, for arms that differ in nothing else."""

import json
from dataclasses import replace

import pytest
from synthetic_study import line, resolved_recipe

from ablate.reports import write_report
from ablate.reports.figures import draw_figures
from ablate.reports.findings.analyse import analyse
from ablate.reports.findings.sensitivity import rate_curves
from ablate.reports.read.load import load_frames
from ablate.reports.statistics.intervals import Interval
from ablate.store.records import config_from_json

LOSSES = {  # arm: (learning rate, GEMMs in FP4, final losses)
    "bf16": (0.004, (), (2.0, 2.1)),
    "bf16 low": (0.002, (), (2.2, 2.25)),
    "bf16 high": (0.008, (), (2.3, 2.4)),
    "fp4": (0.004, ("fprop",), (2.5, 2.6)),
    "fp4 low": (0.002, ("fprop",), (2.1, 2.2)),
    "alone": (0.004, ("wgrad",), (2.2, 2.2)),
}


@pytest.fixture
def rates(make_study):
    arms = {name: [line(3.0, loss) for loss in losses] for name, (_, _, losses) in LOSSES.items()}
    resolved = {name: resolved_recipe(*gemms) for name, (_, gemms, _) in LOSSES.items()}
    own = {name: {"learning_rate": rate} for name, (rate, _, _) in LOSSES.items()}
    return make_study(arms, resolved=resolved, own_training=own, target={"value": 2.5})


def test_arms_alike_but_for_the_rate_make_a_curve(rates):
    curves = {curve.name: curve for curve in analyse(load_frames(rates)).rate_curves}
    assert set(curves) == {"bf16", "fp4"}  # named after the arm at the baseline's rate; one rate is no curve
    assert [rate.learning_rate for rate in curves["bf16"].rates] == [0.002, 0.004, 0.008]
    assert [rate.arm for rate in curves["bf16"].rates] == ["bf16 low", "bf16", "bf16 high"]
    best = curves["bf16"].best
    assert (best.arm, best.n, curves["bf16"].best_is_outermost) == ("bf16", 2, False)
    assert best.loss.estimate == pytest.approx(2.05)
    assert (curves["fp4"].best.arm, curves["fp4"].best_is_outermost) == ("fp4 low", True)


def test_what_else_differs_parts_the_curves(rates):
    frames = load_frames(rates)
    changed = config_from_json(frames.configs["bf16 low"].whole | {"model": {"width": 64}})
    other = frames.configs | {"bf16 low": changed}
    curve = rate_curves(analyse(frames).arms, other, "bf16")[0]
    assert [rate.arm for rate in curve.rates] == ["bf16", "bf16 high"]


def test_a_rate_that_diverged_has_no_mean_and_is_never_the_best(rates):
    analysis = analyse(load_frames(rates))
    arms = [
        replace(arm, runs=(replace(arm.runs[0], end="diverged"),), final_loss=Interval(note="diverged"))
        if arm.name == "bf16"
        else arm
        for arm in analysis.arms
    ]
    curve = rate_curves(arms, load_frames(rates).configs, "bf16")[0]
    assert [rate.diverged for rate in curve.rates] == [0, 1, 0]
    assert curve.best.arm == "bf16 low"
    drawings = draw_figures(replace(analysis, rate_curves=(curve,)))
    assert b"<svg" in next(one.svg for one in drawings if one.name == "learning-rate")


def test_the_report_shows_it(rates):
    written = write_report(rates)
    page = written.html.read_text()
    assert "bf16 at 0.004; fp4 at 0.002 (the outermost tried)" in page
    assert (written.figures / "learning-rate.svg").exists()
    document = json.loads(written.json.read_text())
    assert [(curve["name"], curve["best"]) for curve in document["learning_rate"]] == [
        ("bf16", 0.004), ("fp4", 0.002),
    ]  # fmt: skip


def test_studies_at_one_rate_have_none(ladder):
    analysis = analyse(load_frames(ladder))
    assert analysis.rate_curves == ()
    assert "learning-rate" not in {drawing.name for drawing in draw_figures(analysis)}
