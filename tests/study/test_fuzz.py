"""Whatever the file says, it is a study or a list of problems with places, never a traceback."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ablate.base.errors import UserError
from ablate.study import Study, load_study, shipped_studies

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
LINES = VALID.splitlines(keepends=True)
WORDS = sorted(set(VALID.replace("[", " ").replace("]", " ").replace("{", " ").replace("}", " ").split()))
SPLINTERS = [
    *WORDS,
    *(
        "~",
        "null",
        "true",
        "-1",
        "0",
        "1e400",
        ".nan",
        "-.inf",
        "0x",
        "!!int x",
        "!x",
        "'",
        '"',
        "&a",
        "*a",
        "*base",
    ),
    *(
        "<<: *base",
        "? ",
        ": ",
        "- ",
        "[",
        "]",
        "{",
        "}",
        "#",
        "|",
        ">",
        "%",
        "@",
        "\t",
        "---\n",
        "...\n",
        "\x00",
    ),
    *(
        '"\\ud800"',
        "\u2028",
        "\ufeff",
        "1" * 5000,
        "9999-99-99",
        "=",
        "[]",
        "{}",
        "'\n'",
        '"\\n"',
        "\r",
        "1_",
        "_",
    ),
]


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "s.yaml"

    def check(content: bytes) -> None:
        path.write_bytes(content)
        try:
            study = load_study(path)
        except UserError as caught:
            error = caught
        else:
            assert isinstance(study, Study)
            return
        assert error.problems
        line_ends = (b"\n", b"\r", b"\xc2\x85", b"\xe2\x80\xa8", b"\xe2\x80\xa9")
        num_lines = sum(map(content.count, line_ends)) + 2
        for problem in error.problems:
            assert problem.line is not None
            assert problem.column is not None
            assert 1 <= problem.line <= num_lines
            assert problem.column >= 1
            line = str(problem)
            assert line.encode()
            assert "\n" not in line

    return check


SHARES = pytest.mark.parametrize(
    "share", [pytest.param(0.1, id="some"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)]
)
"""How many of its examples a test draws: a tenth, or as a long proof all of them."""


def draws(count, share, **strategies):
    """Make a property a function that tests it on that share of ``count`` examples."""
    return lambda holds: settings(max_examples=int(count * share))(given(**strategies)(holds))


@SHARES
def test_random_bytes(check, share):
    @draws(300, share, content=st.binary(max_size=200))
    @example(content=b"")
    def holds(content):
        check(content)

    holds()


@SHARES
def test_random_text(check, share):
    @draws(300, share, text=st.text(max_size=200))
    def holds(text):
        check(text.encode("utf-8", "surrogatepass"))

    holds()


@SHARES
def test_random_splinters_of_yaml(check, share):
    @draws(300, share, parts=st.lists(st.sampled_from([*SPLINTERS, "\n", "\n  ", "\n    "]), max_size=30))
    def holds(parts):
        check(" ".join(parts).encode("utf-8", "surrogatepass"))

    holds()


@SHARES
def test_mutations_of_a_valid_file(check, share):
    @draws(600, share, data=st.data())
    def holds(data):
        text = VALID
        for _ in range(data.draw(st.integers(1, 4))):
            start = data.draw(st.integers(0, len(text)))
            length = data.draw(st.sampled_from([0, 0, 1, 2, 5, 20]))
            text = text[:start] + data.draw(st.sampled_from(["", *SPLINTERS])) + text[start + length :]
        check(text.encode("utf-8", "surrogatepass"))

    holds()


@SHARES
def test_values_of_a_valid_file_replaced(check, share):
    """Replace a word by another: mostly valid YAML, so that the later stages are reached."""

    @draws(300, share, data=st.data())
    def holds(data):
        text = VALID
        for _ in range(data.draw(st.integers(1, 3))):
            word, other = data.draw(st.sampled_from(WORDS)), data.draw(st.sampled_from(SPLINTERS))
            text = text.replace(word, other, 1)
        check(text.encode("utf-8", "surrogatepass"))

    holds()


@SHARES
def test_lines_of_a_valid_file_reordered(check, share):
    order, keep = st.permutations(range(len(LINES))), st.sets(st.integers(0, len(LINES) - 1))

    @draws(200, share, order=order, keep=keep)
    def holds(order, keep):
        check("".join(LINES[i] for i in order if i in keep).encode())

    holds()


@pytest.mark.parametrize("turns", [150, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_many_mutations_of_a_valid_file(check, turns):
    draw = random.Random(0)
    for _ in range(turns):
        text = VALID
        for _ in range(draw.choice([1, 1, 2, 3])):
            if draw.random() < 0.5:
                text = text.replace(draw.choice(WORDS), draw.choice(SPLINTERS), 1)
            else:
                at = draw.randrange(len(text))
                text = text[:at] + draw.choice(SPLINTERS) + text[at + draw.choice([0, 1, 3, 10]) :]
        check(text.encode("utf-8", "surrogatepass"))


def test_the_valid_file_is_valid(tmp_path):
    path = Path(tmp_path / "s.yaml")
    path.write_text(VALID)
    assert len(load_study(path).arms) == 5


def test_shipped_studies_are_valid():
    assert set(shipped_studies()) >= {"quickstart", "amd-ladder"}
    for name in shipped_studies():
        assert load_study(name).name == name
