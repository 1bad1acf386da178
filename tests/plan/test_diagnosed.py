"""``diagnostics:`` of a study: its faults are lines of the file, and it is no part of a run's identity."""

import pytest

from ablate.base.errors import UserError
from ablate.plan import build_plan, to_lock
from ablate.run.diagnostics import DEFAULT_STEPS, Diagnostics
from ablate.study import load_study

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
def plan_of(tmp_path):
    def plan(more=""):
        path = tmp_path / "s.yaml"
        path.write_text(STUDY + more)
        return build_plan(load_study(path))

    return plan


def faults(plan_of, text):
    with pytest.raises(UserError) as caught:
        plan_of(text)
    return [str(problem).partition("s.yaml:")[2] for problem in caught.value.problems]


def test_switched_on_it_changes_no_id_and_no_lock(plan_of):
    off = plan_of()
    on = plan_of("diagnostics: {every_tokens: 10_000, layers: ['*.down', head], draws: 8}\n")
    assert off.diagnostics is None
    assert on.diagnostics == Diagnostics(every_tokens=10_000, layers=["*.down", "head"], draws=8)
    assert [run.id for _, run in on.runs()] == [run.id for _, run in off.runs()]
    assert to_lock(on) == to_lock(off)


def test_nothing_said_means_the_defaults(plan_of):
    assert plan_of("diagnostics: {}\n").diagnostics == Diagnostics()
    assert Diagnostics().interval(4096) == DEFAULT_STEPS * 4096
    assert plan_of("diagnostics:\n").diagnostics is None


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{every_token: 3}", "9:15: diagnostics.every_token: unknown key (did you mean 'every_tokens'?)"),
        ("{every_tokens: 0}", "9:29: diagnostics.every_tokens: expected a number above 0, got 0"),
        ("{draws: 1}", "9:22: diagnostics.draws: expected a number from 2 up, got 1"),
        (
            "{layers: middle}",
            (
                "9:23: diagnostics.layers: expected a list of patterns of layer names, or 'ends and middle', "
                "got 'middle'"
            ),
        ),
        ("yes please", "9:14: diagnostics: expected a mapping, got 'yes please'"),
        (
            "{layers: ['*.down', block.1.ffn.down]}",
            (
                "9:34: diagnostics.layers: 'block.1.ffn.down' names no layer of any arm "
                "(did you mean 'blocks.1.ffn.down'?)"
            ),
        ),
    ],
)
def test_each_fault_is_a_line_of_the_file(plan_of, text, line):
    assert faults(plan_of, f"diagnostics: {text}\n") == [line]
