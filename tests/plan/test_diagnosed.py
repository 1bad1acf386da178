"""``diagnostics:`` of a study is no part of a run's identity."""

import pytest

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


@pytest.fixture
def plan_of(plan):
    return lambda more="": plan(STUDY + more, "s.yaml")


def test_nothing_said_means_the_defaults(plan_of):
    assert plan_of().diagnostics is plan_of("diagnostics:\n").diagnostics is None
    assert plan_of("diagnostics: {}\n").diagnostics == Diagnostics()
    assert Diagnostics().interval(4096) == DEFAULT_STEPS * 4096


def test_other_recipes_have_the_words_that_stand_for_them_and_change_no_id(plan_of):
    off = plan_of()
    mapping = "{gemms: [wgrad], stabiliser: sr}"
    first, last = "{first: 1, recipe: bf16}", "{last: 1, recipe: mxfp8}"
    ruled = f"{{gemms: [wgrad], layers: [{first}, {last}]}}"
    ruled_else = f"{{gemms: [wgrad], layers: [{last}, {first}]}}"
    on = plan_of(f"diagnostics: {{what_if: [mxfp4, tetrajet, {mapping}, {ruled}, {ruled_else}]}}\n")
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
