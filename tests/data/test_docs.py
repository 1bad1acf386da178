"""The data sections that the documentation shows are ones that a study can have."""

import re
from pathlib import Path

import pytest

from ablate.study import load_study

TEXT = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
SECTIONS = re.findall(r"^```yaml\n(base:\n.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE)
assert SECTIONS
REST = "name: small\nbaseline: bf16\ntarget: {val_loss: 3.3}\nseeds: 1\narms:\n  bf16: {recipe: bf16}\n"


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_of_the_documentation_is_valid(section, tmp_path):
    (tmp_path / "small.yaml").write_text(REST + section)
    data = load_study(tmp_path / "small.yaml").arms[0].data
    assert data.paths
    assert data.tokenizer in section
