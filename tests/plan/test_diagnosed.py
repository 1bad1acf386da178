"""``diagnostics:`` of a study: its faults are lines of the file, and it is no part of a run's identity."""

import pytest

from ablate.base.errors import UserError
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
MODEL = """\
from torch import nn

class Net(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.table = nn.Embedding(vocab_size, 48)
        self.inner = nn.Linear(48, 64)
        self.head = nn.Linear(64, vocab_size)

    def forward(self, tokens):
        return self.head(self.inner(self.table(tokens)))

def build(*, vocab_size, seq_len):
    return Net(vocab_size)
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


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "{what_if: [mxfp4]}\n  c: {model: {function: net.py:build}}",
            (
                "10:25: diagnostics.what_if[0]: in-features 48 of layer inner is not a multiple of 32, as "
                "Fprop needs it; arm 'c' (give the layer a rule of its own: "
                "layers: [{match: …, recipe: bf16}])"
            ),
        ),
        (
            "{layers: middle}",
            (
                "9:23: diagnostics.layers: expected a list of patterns of layer names, or 'ends and middle', "
                "got 'middle'"
            ),
        ),
        (
            "{what_if: [bf16]}",
            "9:25: diagnostics.what_if[0]: it quantises nothing, so that there is nothing to measure",
        ),
        (
            "{what_if: [mxfp4, {gemms: [fprop, dgrad, wgrad]}]}",
            "9:32: diagnostics.what_if[1]: the same recipe as what_if[0]",
        ),
        (
            "{layers: ['*.down', block.1.ffn.down]}",
            (
                "9:34: diagnostics.layers: 'block.1.ffn.down' names no layer of any arm "
                "(did you mean 'blocks.1.ffn.down'?)"
            ),
        ),
        (
            "{what_if: [{gemms: [fprop], stabiliser: dht, hadamard_size: 256}]}",
            (
                "9:25: diagnostics.what_if[0]: in-features 128 of layer blocks.0.attention.qkv is not a "
                "multiple of 256, as Fprop needs it; arm 'a' (give the layer a rule of its own: "
                "layers: [{match: …, recipe: bf16}])"
            ),
        ),
        (
            "{what_if: [{gemms: [fprop], layers: [{match: nothing, recipe: bf16}]}]}",
            (
                "9:25: diagnostics.what_if[0]: no layer of this model is called 'nothing'; arm 'a' "
                "(its layers are blocks.0.attention.qkv … head)"
            ),
        ),
    ],
)
def test_each_fault_is_a_line_of_the_file(plan_of, tmp_path, text, line):
    (tmp_path / "net.py").write_text(MODEL)
    asked, _, arm = text.partition("\n")
    with pytest.raises(UserError) as caught:
        plan_of(f"{arm}\n" * bool(arm) + f"diagnostics: {asked}\n")
    assert str(caught.value) == f"{tmp_path}/s.yaml:{line}"
