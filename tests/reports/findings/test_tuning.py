"""What a comparison owes to the learning rate: arms at values found for them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from synthetic_study import analysed, line, resolved_recipe
from texts import check_page

from ablate.reports import write_report
from ablate.reports.figures.curves import draw_trials
from ablate.results.frames import load_frames
from ablate.results.stops import unneeded_runs


def study_of(make_study, **more):
    """A study of ``ARMS``."""
    curves = {}
    resolved = {}
    own_training = {}
    for name, (rate, gemms, losses) in ARMS.items():
        curves[name] = [line(3.0, loss, 1.5) for loss in losses]
        resolved[name] = resolved_recipe(*gemms)
        own_training[name] = {"learning_rate": rate}
    return make_study(
        curves, resolved=resolved, own_training=own_training, tuning=TUNING, **more
    )


# Of each arm the learning rate, the GEMMs in FP4, and the loss half-way of each seed: with a lower one a run
# reaches the target sooner.
ARMS = {
    "bf16": (0.002, (), (2.00, 2.02, 1.98)),
    "fprop": (0.002, ("fprop",), (2.60, 2.58, 2.62)),
    "alike": (0.002, ("wgrad",), (2.10, 2.12, 2.08)),
    "bf16 tuned": (0.004, (), (1.80, 1.82, 1.78)),
    "fprop tuned": (0.008, ("fprop",), (1.80, 1.83, 1.79)),
}


def group(name, chosen, losses):
    """A group with trials at four rates; of a loss of None one that was pruned, above 5 one that diverged."""
    trials = [
        {
            "number": i, "values": {"learning_rate": rate}, "state": "pruned" if loss is None else "complete",
            "loss": loss, "diverged": int((loss or 0) > 5), "tokens": 1000 if loss is None else 2000,
            "runs": [f"t{i}"],
        }
        for i, (rate, loss) in enumerate(zip((0.002, 0.004, 0.008, 0.001), losses, strict=True))
    ]  # fmt: skip
    values = {"shared": {"learning_rate": 0.002}, "chosen": {"learning_rate": chosen}}
    return {"name": name, "fingerprint": "f", "arms": [name], "trials": trials} | values


TUNING = {
    "study": "synthetic tune", "done": True, "fields": {"learning_rate": {}}, "sampler": "tpe", "trials": 4,
    "at_once": 2, "prune": True, "tokens": 250_000, "seeds": [3],
    "tuned": {"bf16": "bf16 tuned", "fprop": "fprop tuned", "alike": "alike"},
    "groups": [
        group("bf16", 0.004, (2.5, 2.4, 2.6, None)),
        group("fprop", 0.008, (2.7, 2.5, 2.4, None)),
        group("alike", 0.002, (2.5, 2.6, 9.0, 2.55)),
    ],
}  # fmt: skip


@pytest.fixture
def tuned(make_study):
    return study_of(make_study, target={"value": 1.7})


def test_the_comparison_is_at_the_values_found_with_the_studys_own_beside(tuned):
    analysis = analysed(tuned)
    assert analysis.baseline == "bf16 tuned"
    arms = {arm.name: arm for arm in analysis.arms}
    assert list(arms) == ["bf16 tuned", "fprop tuned", "alike"]
    assert abs(arms["fprop tuned"].token_cost.estimate) < 0.01
    for name, rate in (("fprop tuned", 0.008), ("alike", 0.002)):
        rates = arms[name].planned.differs["training.learning_rate"]
        assert rates == (0.004, rate)
    assert [arm.name for arm in analysis.every_arm] == ["bf16", "fprop", *arms]
    # A GEMM's step is found although the rates differ.
    pairs = [(step.from_arm, step.to_arm) for step in analysis.steps]
    assert ("bf16 tuned", "fprop tuned") in pairs


def test_the_trials_losses_are_in_the_studys_unit(tuned):
    in_nats = write_report(tuned).markdown.read_text()
    tuned.write_plan(replace(tuned.plan(), loss_unit="log10"))
    written = write_report(tuned)
    assert written.markdown.read_text() == in_nats.replace("nats/token", "log10/token")
    figure = (written.figures / "trials.svg").read_text()
    assert "final validation loss (log10/token)" in figure


def test_pages_and_json_say_it(tuned):
    written = write_report(tuned)
    check_page("tuned", written.markdown)
    found = json.loads(written.json.read_text())["tuning"]
    assert found["tokens_of_all_trials"] == 22_000
    assert [arm["name"] for arm in found["arms_at_shared_values"]] == ["bf16", "fprop"]
    assert found["groups"][2]["trials"][2]["diverged"] == 1
    analysis = analysed(tuned)
    plan = replace(analysis.tuning.plan, fields={"weight_decay": {}})
    tuning = replace(analysis.tuning, plan=plan)
    assert draw_trials(replace(analysis, tuning=tuning)) is None


def test_before_tuning_has_ended_the_report_says_so(make_study):
    groups = [TUNING["groups"][0] | {"chosen": None}]
    pending = TUNING | {"done": False, "tuned": {}, "groups": groups}
    runs = [line(3.0, 2.0, 1.5)] * 2
    store = make_study({"bf16": runs, "fprop": runs}, tuning=pending)
    written = write_report(store)
    assert written.notices[0].startswith(
        "Tuning has not ended (ablate status 'synthetic tune')"
    )
    document = json.loads(written.json.read_text())
    assert (document["baseline"], document["tuning"]["done"]) == ("bf16", False)


def test_a_stop_rule_is_asked_of_both_comparisons(make_study):
    """An arm that diverges at the study's own value is stopped there, and goes on at the value found."""
    states = {}
    unneeded = []
    for arm in ("fprop", "alike"):
        states |= {(arm, 0): "diverged", (arm, 1): "pending", (arm, 2): "pending"}
        unneeded += [(arm, 1), (arm, 2)]
    store = study_of(make_study, states=states, stop={"diverged": 1})
    ids = {run.id: (arm.name, run.seed) for arm, run in store.plan().runs()}
    assert [ids[run] for run in unneeded_runs(load_frames(store))] == unneeded
    stopped = [arm.name for arm in analysed(store).every_arm if arm.stopped is not None]
    assert stopped == ["fprop", "alike"]
