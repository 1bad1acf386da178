"""``diagnostics:`` of a study is no part of a run's identity."""

from ablate.recipes import PRESETS
from ablate.run.diagnostics import DEFAULT_STEPS, Diagnostics
from ablate.store.plan_file import plan_to_json

STUDY = """\
name: s
baseline: a
target: {val_loss: 3.3}
base:
  training: {tokens: 100_000}
arms:
  a: {recipe: bf16}
  b: {recipe: mxfp4}
"""
WHAT_IF = """\
diagnostics:
  what_if:
    - mxfp4
    - tetrajet
    - {gemms: [wgrad], stabiliser: sr}
    - {gemms: [wgrad], layers: [{first: 1, recipe: bf16}, {last: 1, recipe: mxfp8}]}
    - {gemms: [wgrad], layers: [{last: 1, recipe: mxfp8}, {first: 1, recipe: bf16}]}
"""


def test_other_recipes_have_the_words_that_stand_for_them_and_change_no_id(plan):
    off = plan(STUDY)
    assert off.diagnostics is plan(f"{STUDY}diagnostics:\n").diagnostics is None
    assert plan(STUDY + "diagnostics: {}\n").diagnostics == Diagnostics()
    assert Diagnostics().interval(4096) == DEFAULT_STEPS * 4096
    on = plan(STUDY + WHAT_IF)
    others = on.diagnostics.other_recipes()
    assert list(others) == [
        "mxfp4",
        "tetrajet",
        "Fprop+Dgrad bf16; Wgrad mxfp4 SR",
        "Fprop+Dgrad bf16; Wgrad mxfp4; 2 rules",
        "Fprop+Dgrad bf16; Wgrad mxfp4; 2 rules (2)",
    ]
    assert others["tetrajet"] == PRESETS["tetrajet"].recipe
    assert plan_to_json(on) == plan_to_json(off)
