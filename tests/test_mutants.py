"""That the mutants still apply; ``python tests/mutants.py`` runs them."""

import re

import pytest

from tests.mutants import INTERPRETED, MUTANTS, ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_its_text_and_its_test_are_there(mutant):
    for file, old, new in mutant.edits:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert old in text, file
        assert text.replace(old, new) != text
    file, _, test = (INTERPRETED, "", mutant.first) if mutant.interpreted else mutant.first.partition("::")
    name = test.split(" and ")[0].split("[")[0]
    assert re.search(rf"def \w*{name}", (ROOT / file).read_text(encoding="utf-8")), f"{file}: no {name}"
