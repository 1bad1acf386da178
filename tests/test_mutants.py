"""That the mutants still apply; ``python tests/mutants.py`` runs them."""

import re

import pytest

from tests.mutants import INTERPRETED, MUTANTS, ROOT, is_interpreted


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant["name"] for mutant in MUTANTS])
def test_its_text_and_its_test_are_there(mutant):
    for edit in mutant["edits"]:
        text = (ROOT / edit["file"]).read_text(encoding="utf-8")
        assert edit["old"] in text, edit["file"]
        assert edit["new"] != edit["old"]
    first = mutant["test"]
    file, _, test = (
        (INTERPRETED, "", first) if is_interpreted(mutant) else first.partition("::")
    )
    name = test.split(" and ")[0].split("[")[0]
    pattern = rf"def {name}\("
    if not test or is_interpreted(mutant):  # words of a name, or a whole file
        pattern = rf"def \w*{name}"
    text = (ROOT / file).read_text(encoding="utf-8")
    assert re.search(pattern, text), f"{file}: no {name}"
