"""``diagnostics:`` of a study is no part of a run's identity."""

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


def test_diagnostics_change_no_id(plan):
    off = plan(STUDY)
    assert off.diagnostics is plan(f"{STUDY}diagnostics:\n").diagnostics is None
    on = plan(STUDY + "diagnostics: {}\n")
    assert on.diagnostics == Diagnostics()
    assert Diagnostics().interval(4096) == DEFAULT_STEPS * 4096
    assert plan_to_json(on) == plan_to_json(off)
