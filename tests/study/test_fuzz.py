"""Whatever the file says, it is a study or a list of problems with places, never a traceback."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ablate.base.errors import UserError
from ablate.study import load_study

VALID = """\
name: fuzz
description: a bit of everything
baseline: a
target: {val_loss: 3.3}
seeds: [0, 1]
base: &base
  model: {width: 64, heads: 2, ffn: 96}
  data: {source: text, paths: [x]}
  training: {tokens: 100_000, learning_rate: 1e-3}
  recipe: {rest: fp8}
  resources: {cpus: 1}
arms:
  a: {recipe: bf16}
  b: {from: a, recipe: {gemms: [fprop, wgrad], wgrad: {stabiliser: dht}}}
grid:
  from: b
  factors:
    recipe.stabiliser: {plain: none, SR: sr}
    model.layers: [1, 2]
    training.learning_rate: [1e-3, 2e-3]
  zip: [[model.layers, training.learning_rate]]
  exclude: [{recipe.stabiliser: SR, model.layers: 1}]
  senseless: drop
"""
WORDS = sorted(set(re.sub(r"[\[\]{}]", " ", VALID).split()))
ODD = r"""~ null true -1 0 1e400 .nan -.inf 0x !x ' " &a *a *base [ ] { } # @ % > | "\ud800" 9999-99-99
= [] {} "\n" 1_ _"""
SPLINTERS = [
    *(*WORDS, *ODD.split(), "1" * 5000),
    *(
        "!!int x",
        "<<: *base",
        "? ",
        ": ",
        "- ",
        "\t",
        "---\n",
        "...\n",
        "\x00",
        "\u2028",
        "\ufeff",
        "'\n'",
    ),
    "\r",
]


@st.composite
def edited(draw):
    """Put splinters in the place of parts of the valid file."""
    text = VALID
    for _ in range(draw(st.integers(1, 4))):
        start, length = (
            draw(st.integers(0, len(text))),
            draw(st.sampled_from([0, 0, 1, 2, 5, 20])),
        )
        text = (
            text[:start]
            + draw(st.sampled_from(["", *SPLINTERS]))
            + text[start + length :]
        )
    return text


@st.composite
def reworded(draw):
    """Replace words by others: mostly valid YAML, so that the later stages are reached."""
    text = VALID
    for _ in range(draw(st.integers(1, 3))):
        text = text.replace(
            draw(st.sampled_from(WORDS)), draw(st.sampled_from(SPLINTERS)), 1
        )
    return text


FILES = {"bytes": st.binary(max_size=200), "edited": edited(), "reworded": reworded()}


@pytest.mark.parametrize(
    "count", [80, pytest.param(1600, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("kind", FILES)
def test_a_file_of_any_content(kind, count, tmp_path):
    @settings(max_examples=count)
    @example(VALID.replace("{plain: none, SR:", '{plain: none, "S\\nR":'))
    @given(FILES[kind])
    def holds(content):
        content = content if isinstance(content, bytes) else content.encode()
        (tmp_path / "s.yaml").write_bytes(content)
        try:
            load_study(tmp_path / "s.yaml")
        except UserError as caught:
            problems = caught.problems
        else:
            return
        line_ends = re.findall(
            "[\n\r\x85\u2028\u2029]", content.decode("utf-8", "replace")
        )
        assert problems
        for problem in problems:
            assert problem.column >= 1
            assert 1 <= problem.line <= len(line_ends) + 2
            assert b"\n" not in str(problem).encode()

    holds()


def test_the_valid_file_is_valid(study):
    assert len(study(VALID).arms) == 5
