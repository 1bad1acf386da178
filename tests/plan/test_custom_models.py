"""Models, trainers and recipes that only planning can check: each fault is a line of the study's file."""

import pytest

from ablate.base.errors import UserError

MODEL = """\
from torch import nn

class Net(nn.Module):
    def __init__(self, vocab_size, width):
        super().__init__()
        self.table = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, vocab_size)

def build(*, vocab_size, seq_len, width=64):
    return Net(vocab_size, width)
"""
HIDDEN = MODEL.replace("(nn.Linear(width, width) for", "(nn.TransformerEncoderLayer(width, 2, 128) for")
STUDY = """\
name: s
baseline: a
target: {val_loss: 3.3}
base:
  model: {function: my_model.py:build}
  training: {tokens: 10_000, eval_every_tokens: 5_000}
arms:
  a: {recipe: bf16}
  b: {recipe: mxfp4}
"""


@pytest.fixture
def plan_of(plan, tmp_path):
    (tmp_path / "my_model.py").write_text(MODEL)
    (tmp_path / "hidden.py").write_text(HIDDEN)
    (tmp_path / "t.py").write_text("def run(*args, **options):\n    pass\n")
    return lambda text=STUDY: plan(text, "s.yaml")


def test_the_plan_knows_a_users_model(plan_of, tmp_path):
    arm = plan_of().arm("b")
    assert [layer.name for layer in arm.layers] == ["blocks.0", "blocks.1", "blocks.2", "head"]
    assert arm.size.parameters == 256 * 64 + 3 * (64 * 64 + 64) + 64 * 256 + 256
    assert arm.config.model.function == f"{tmp_path}/my_model.py:build"
    before = arm.runs[0].id
    (tmp_path / "my_model.py").write_text(MODEL + "\n# changed\n")
    assert plan_of().arm("b").runs[0].id != before


def test_a_trainer_changes_the_id_by_its_code(plan_of, tmp_path):
    planned = plan_of(STUDY.replace("  b: {recipe: mxfp4}", "  b: {recipe: bf16, trainer: t.py:run}"))
    assert planned.arm("b").differs == {"trainer": (None, f"{tmp_path}/t.py:run")}
    assert planned.arm("a").runs[0].id != planned.arm("b").runs[0].id


HIDES = "my_model.py:build}", "hidden.py:build}"
UNREACHED = (
    "s.yaml:5:21: the recipe does not reach 6 matrices of the model: blocks.*.self_attn.in_proj_weight (3): "
    "torch.nn.MultiheadAttention holds it, which is no torch.nn.Linear; blocks.*.self_attn.out_proj (3): "
    "torch.nn.MultiheadAttention multiplies by its weight itself; arm 'b' (if high precision is meant there: "
    "model.allow: ['blocks.*.self_attn.in_proj_weight', 'blocks.*.self_attn.out_proj'])"
)
MISNAMED = (
    "s.yaml:5:45: model.allow: '*.in_proj_wieght' names no matrix that is out of a recipe's reach; arm 'a' "
    "(expected blocks.*.self_attn.in_proj_weight or blocks.*.self_attn.out_proj)"
)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("my_model.py:build", "nowhere.py:build", "s.yaml:5:21: {tmp}/nowhere.py:build: no such file"),
        ("my_model.py:build", "my_model.py:other", "s.yaml:5:21: {tmp}/my_model.py:other: my_model.py"),
        ("my_model.py:build", "my_model.py", "s.yaml:5:21: '{tmp}/my_model.py' names no function"),
        ("my_model.py:build", "no_such_module:build", "s.yaml:5:21: no_such_module:build: no module"),
        ("{function: my_model.py:build}", "{hf: ./nowhere}", "s.yaml:5:15: model.hf: no such file or folder"),
        ("my_model.py:build}", "my_model.py:build, options: {wide: 3}}", "s.yaml:5:21: model.function"),
        (
            "my_model.py:build}",
            "my_model.py:build, options: {width: 48}}",
            "s.yaml:9:15: in-features 48 of layer blocks.0 is not a multiple of 32, as Fprop needs it",
        ),
        (
            "{recipe: mxfp4}",
            "{recipe: {gemms: [wgrad], layers: [{match: '*.q_proj', recipe: bf16}]}}",
            "s.yaml:9:40: no layer of this model is called '*.q_proj'; arm 'b'",
        ),
        ("  b: {recipe: mxfp4}", "  b: {trainer: nowhere.py:run}", "s.yaml:9:16: {tmp}/nowhere.py:run: no"),
        (*HIDES, UNREACHED),
        ("my_model.py:build}", "hidden.py:build, allow: ['*.in_proj_wieght', '*.out_proj']}", MISNAMED),
    ],
)  # fmt: skip
def test_each_fault_is_a_line_of_the_study(plan_of, tmp_path, before, after, said):
    with pytest.raises(UserError) as caught:
        plan_of(STUDY.replace(before, after))
    assert str(caught.value).startswith(f"{tmp_path}/{said.format(tmp=tmp_path)}")
    assert "\n" not in str(caught.value)


def test_what_is_allowed_is_in_the_plan_and_changes_no_id(plan_of):
    some, every = (
        plan_of(STUDY.replace("my_model.py:build}", f"hidden.py:build, allow: {allow}}}")).arm("b")
        for allow in ("['*.in_proj_weight', '*.out_proj']", "['*']")
    )
    assert (some.coverage.count("fprop"), len(some.coverage.out_of_reach)) == (6, 6)
    assert every.runs == some.runs
