"""The report of a study that tunes its arms: at the values found, with the study's own beside."""

from __future__ import annotations

import html
import json
from dataclasses import replace

import pytest
from synthetic_study import line, resolved_recipe

from ablate.base.errors import UserError
from ablate.reports import write_report
from ablate.reports.figures import draw_figures
from ablate.reports.findings.analyse import analyse
from ablate.reports.findings.tuning import rate_curves
from ablate.results.frames import load_frames
from ablate.results.intervals import Interval
from ablate.results.stops import unneeded_runs
from ablate.run.outcome import Outcome
from ablate.store.records import RecordedConfig, with_whole

# arm: learning rate, GEMMs in FP4, losses at its seeds half-way; a lower one reaches the target sooner
ARMS = {
    "bf16": (0.002, (), (2.00, 2.02, 1.98)),
    "fprop": (0.002, ("fprop",), (2.60, 2.58, 2.62)),
    "alike": (0.002, ("wgrad",), (2.10, 2.12, 2.08)),
    "bf16 tuned": (0.004, (), (1.80, 1.82, 1.78)),
    "fprop tuned": (0.008, ("fprop",), (1.80, 1.83, 1.79)),
}
TUNED = {"bf16": "bf16 tuned", "fprop": "fprop tuned", "alike": "alike"}


def trial(number, rate, loss, *, state="complete", diverged=0):
    return {
        "number": number, "values": {"learning_rate": rate}, "state": state, "loss": loss,
        "diverged": diverged, "tokens": 1000 if state == "pruned" else 2000, "runs": [f"t{number}"],
    }  # fmt: skip


def group(name, chosen, trials):
    values = {"shared": {"learning_rate": 0.002}, "chosen": {"learning_rate": chosen}}
    return {"name": name, "fingerprint": "f", "arms": [name], "trials": trials} | values


TUNING = {
    "study": "synthetic tune", "done": True, "fields": {"learning_rate": {}}, "sampler": "tpe", "trials": 4,
    "at_once": 2, "prune": True, "tokens": 250_000, "seeds": [3], "tuned": TUNED,
    "groups": [
        group("bf16", 0.004, [trial(0, 0.002, 2.5), trial(1, 0.004, 2.4), trial(2, 0.008, 2.6),
                              trial(3, 0.001, None, state="pruned")]),
        group("fprop", 0.008, [trial(0, 0.002, 2.7), trial(1, 0.004, 2.5), trial(2, 0.008, 2.4),
                               trial(3, 0.001, None, state="pruned")]),
        group("alike", 0.002, [trial(0, 0.002, 2.5), trial(1, 0.004, 2.6), trial(2, 0.008, 9.0, diverged=1),
                               trial(3, 0.001, 2.55)]),
    ],
}  # fmt: skip


@pytest.fixture
def tuned(make_study):
    arms = {name: [line(3.0, loss, 1.5) for loss in losses] for name, (_, _, losses) in ARMS.items()}
    return make_study(
        arms,
        resolved={name: resolved_recipe(*gemms) for name, (_, gemms, _) in ARMS.items()},
        own_training={name: {"learning_rate": rate} for name, (rate, _, _) in ARMS.items()},
        target={"value": 1.7},
        tuning=TUNING,
    )


def test_the_comparison_is_at_the_values_found(tuned):
    analysis = analyse(load_frames(tuned))
    assert analysis.baseline == "bf16 tuned"
    assert [arm.name for arm in analysis.arms] == ["bf16 tuned", "fprop tuned", "alike"]
    assert abs(analysis.arms[1].token_cost.estimate) < 0.01
    assert [arm.name for arm in analysis.every_arm] == ["bf16", "fprop", *(arm.name for arm in analysis.arms)]
    assert analysis.planned == 15


def test_both_costs_stand_side_by_side(tuned):
    _, fprop, alike = analyse(load_frames(tuned)).tuning.arms
    assert fprop.token_cost_shared.kind == fprop.token_cost_tuned.kind == "interval"
    assert fprop.token_cost_shared.low > 0.05  # at the study's own rate it seems to cost tokens
    assert fprop.token_cost_tuned.low < 0 < fprop.token_cost_tuned.high
    # The baseline has become better.
    assert alike.token_cost_shared.estimate < alike.token_cost_tuned.estimate
    assert (fprop.trials_complete, fprop.trials_pruned, fprop.trials_diverged) == (3, 1, 0)
    assert fprop.tokens_of_the_trials == 7000
    assert (alike.trials_complete, alike.trials_pruned, alike.trials_diverged) == (3, 0, 1)
    assert (fprop.loss_shared, fprop.loss_chosen) == (2.7, 2.4)
    assert (fprop.outermost, alike.outermost) == (("learning_rate",), ())


def test_what_arms_differ_in_is_stated_against_the_tuned_baseline(tuned):
    arms = {arm.name: arm for arm in analyse(load_frames(tuned)).arms}
    assert arms["fprop tuned"].planned.differs["training.learning_rate"] == (0.004, 0.008)
    assert arms["alike"].planned.differs["training.learning_rate"] == (0.004, 0.002)


def test_a_gemms_step_is_found_although_the_rates_differ(tuned):
    steps = {(step.from_arm, step.to_arm) for step in analyse(load_frames(tuned)).steps}
    assert ("bf16 tuned", "fprop tuned") in steps


def test_the_report_says_it(tuned):
    written = write_report(tuned)
    page, text = html.unescape(written.html.read_text()), written.markdown.read_text()
    spent = "The trials took 22\u00a0k tokens in all"
    caveat = "are from trials of 250\u00a0k tokens, 25.0\u00a0% of a run's, with 1 seed of their own"
    edge = "The outermost of the values tried was found best: learning_rate of fprop at 0.008."
    for sentence in (spent, caveat, edge):
        assert sentence in page
        assert sentence.replace("\u00a0", " ") in text.replace("\\_", "_")
    assert '<section id="tuning"' in page
    assert "3 / 1 / 0" in page
    assert (written.figures / "trials.svg").exists()
    assert "Rings: the rates found: bf16 at 0.004; fprop at 0.008; alike at 0.002" in page
    assert (written.tables / "tuning.tex").exists()
    runs = (written.tables / "runs.csv").read_text()
    assert runs.count("\n") == 16


def test_the_json_holds_it(tuned):
    found = json.loads(write_report(tuned).json.read_text())["tuning"]
    assert (found["done"], found["trials"], found["tokens"], found["tokens_of_all_trials"]) == (
        True, 4, 250_000, 22_000,
    )  # fmt: skip
    fprop = found["arms"][1]
    assert (fprop["tuned"], fprop["chosen"]) == ("fprop tuned", {"learning_rate": 0.008})
    assert fprop["token_cost_shared"]["low"] > fprop["token_cost_tuned"]["high"]
    assert [arm["name"] for arm in found["arms_at_shared_values"]] == ["bf16", "fprop"]
    assert found["groups"][2]["trials"][2]["diverged"] == 1


def test_before_tuning_has_ended_the_report_says_so(make_study):
    arms = {name: [line(3.0, 2.0, 1.5)] * 2 for name in ("bf16", "fprop")}
    pending = TUNING | {"done": False, "tuned": {}, "groups": [TUNING["groups"][0] | {"chosen": None}]}
    store = make_study(arms, tuning=pending, target={"value": 1.7})
    written = write_report(store)
    assert written.notices[0].startswith("Tuning has not ended (ablate status 'synthetic tune')")
    assert analyse(load_frames(store)).baseline == "bf16"
    assert json.loads(written.json.read_text())["tuning"]["done"] is False


def test_a_plan_with_half_a_tuning_is_one_line(make_study):
    groups = [{key: value for key, value in TUNING["groups"][0].items() if key != "trials"}]
    store = make_study({"bf16": [line(3.0, 2.0, 1.5)]}, tuning=TUNING | {"groups": groups})
    with pytest.raises(UserError, match=r"plan\.lock\.json: not a plan: tuning\.groups\.0\.trials"):
        load_frames(store)


def test_a_stop_rule_is_asked_of_both_comparisons(make_study):
    """An arm that diverges at the study's own value is stopped there, and goes on at the value found."""
    arms = {name: [line(3.0, loss, 1.5) for loss in losses] for name, (_, _, losses) in ARMS.items()}
    states = {("fprop", 0): "diverged", ("fprop", 1): "pending", ("fprop", 2): "pending"}
    states |= {("alike", 0): "diverged", ("alike", 1): "pending", ("alike", 2): "pending"}
    store = make_study(arms, states=states, target={"value": 1.7}, tuning=TUNING, stop={"diverged": 1})
    ids = {(arm.name, run.seed): run.id for arm, run in store.plan().runs()}
    unneeded = unneeded_runs(load_frames(store))
    assert set(unneeded) == {ids[arm, seed] for arm in ("fprop", "alike") for seed in (1, 2)}
    analysis = analyse(load_frames(store))
    assert [arm.name for arm in analysis.stopped] == ["fprop", "alike"]


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
    changed = with_whole(RecordedConfig, frames.configs["bf16 low"].whole | {"model": {"width": 64}})
    other = frames.configs | {"bf16 low": changed}
    curve = rate_curves(analyse(frames).arms, other, "bf16")[0]
    assert [rate.arm for rate in curve.rates] == ["bf16", "bf16 high"]


def test_a_rate_that_diverged_has_no_mean_and_is_never_the_best(rates):
    analysis = analyse(load_frames(rates))
    arms = [
        replace(
            arm,
            runs=(replace(arm.runs[0], outcome=Outcome(seed=0, end="diverged")),),
            final_loss=Interval(note="diverged"),
        )
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
