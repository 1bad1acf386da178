import pytest

from ablate.base.errors import UserError
from ablate.run.presets import PRESETS
from ablate.study import load_study

STUDY = """\
name: s
baseline: a
target: {val_loss: 3.3}
base:
  model: {preset: llama3.2-1b, layers: 2}
arms:
  a: {recipe: bf16}
  own field: {model: {ffn: 4096}}
  other preset: {model: {preset: llama-tiny}}
  after it: {from: other preset, model: {layers: 3}}
grid:
  factors: {model.preset: [llama-tiny, llama3.2-3b]}
"""


@pytest.fixture
def study(tmp_path):
    def load(text):
        path = tmp_path / "s.yaml"
        path.write_text(text)
        return load_study(path)

    return load


def test_fields_beside_a_preset_change_it_and_a_preset_replaces_what_was_inherited(study):
    arms = {arm.name: arm.model for arm in study(STUDY).arms}
    assert (arms["a"].width, arms["a"].layers, arms["a"].kv_heads) == (2048, 2, 8)
    assert (arms["own field"].ffn, arms["own field"].layers) == (4096, 2)
    tiny = PRESETS["llama-tiny"]
    assert (arms["other preset"].layers, arms["other preset"].rope_base) == (tiny["layers"], 10_000.0)
    assert (arms["after it"].layers, arms["after it"].ffn) == (3, tiny["ffn"])
    widths = sorted(model.width for model in arms.values())
    assert 3072 in widths  # the grid's second cell; its first is the arm that is there already


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ("preset: llama3.2-1b", "preset: lama3.2-1b", "unknown preset 'lama3.2-1b' (did you mean"),
        ("preset: llama3.2-1b", "preset: 3", "base.model.preset"),
        ("layers: 2", "heads: 7", "7"),
    ],
)  # fmt: skip
def test_faults_stand_where_they_were_written(study, before, after, fault):
    with pytest.raises(UserError) as caught:
        study(STUDY.replace(before, after))
    assert fault in str(caught.value)
    assert "s.yaml:5:" in str(caught.value)
