"""The exact lines for what can be wrong in a study file. ``study.yaml:`` is left out of each line.

``errors`` holds a small file for each fault, ``NAME.yaml``, and beside it the lines, ``NAME.txt``. Where a
message is meant to change, ``python tests/study/test_errors.py`` writes the lines anew, for the diff to show.
Files that are long or computed stand below.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ablate.base.errors import UserError
from ablate.study import load_study

HEAD = """\
name: s
baseline: a
target: {val_loss: 3.3}
"""

FOLDER = Path(__file__).parent / "errors"
FILES = sorted(FOLDER.glob("*.yaml"))


def test_every_file_has_its_lines_and_nothing_else_lies_there():
    assert len(FILES) >= 81
    assert {path.with_suffix(".txt") for path in FILES} == set(FOLDER.glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_fault_has_its_line(path, problems):
    lines = problems(path.read_bytes())
    assert lines == path.with_suffix(".txt").read_text(encoding="utf-8").splitlines()


def test_long_names_of_cells(problems):
    text = HEAD + f"arms: {{a: }}\ngrid:\n  factors:\n    data.text_field: [{'x' * 90}, y]\n"
    (line,) = problems(text + "    data.source: [hub]\n    data.paths: [[z]]\n")
    assert line == (
        "6:3: grid.factors: the values make names that cannot name an arm (1 to 80 printable characters, no "
        "space around; give the values labels: {label: value})"
    )


def test_a_grid_of_too_many_cells_is_not_expanded(problems):
    values = ", ".join(str(32 * i) for i in range(1, 101))
    factors = "".join(
        f"    {path}: [{values}]\n" for path in ("model.width", "model.ffn", "training.seq_len")
    )
    assert problems(f"{HEAD}arms: {{a: }}\ngrid:\n  factors:\n{factors}") == [
        "6:3: grid.factors: the grid has 1000000 cells (at most 100000)"
    ]


def test_too_many_runs(problems):
    layers = ", ".join(map(str, range(1, 102)))
    text = HEAD.replace("baseline: a", "baseline: layers=1") + "seeds: 10000\n"
    assert problems(f"{text}grid:\n  factors:\n    model.layers: [{layers}]\n") == [
        "4:8: seeds: 101 arms × 10000 seeds are too many runs (at most 1000000)"
    ]


def test_a_number_with_hundreds_of_digits(problems):
    text = f"{HEAD}base:\n  model: {{rope_base: {'1' * 400}, width: {'1' * 5000}}}\narms: {{a: }}\n"
    assert problems(text) == [
        f"5:22: base.model.rope_base: expected a number, got {'1' * 39}…",
        f"5:431: base.model.width: {'1' * 40!r} is not a number that can be read",
    ]


def test_all_faults_of_a_file_come_at_once_and_in_its_order(problems):
    text = """\
name: a/b
target: 3.3
baseline: bf17
base:
  model: {widht: 128}
arms:
  bf16:
  fp8: {recipe: fp9}
  x: {from: fp88}
"""
    lines = problems(text)
    assert [line.split(" ")[1] for line in lines] == [
        "name:",
        "target:",
        "baseline:",
        "base.model.widht:",
        "arms.fp8.recipe:",
        "arms.x.from:",
    ]


def test_what_many_arms_inherit_is_reported_once(problems):
    arms = "".join(f"  a{i}: {{training: {{learning_rate: 0.{i + 1}}}}}\n" for i in range(9))
    text = HEAD.replace("baseline: a", "baseline: a0") + "base:\n  model: {width: 130}\narms:\n" + arms
    assert problems(text) == [
        (
            "5:18: base.model.width: width 130 is not a multiple of heads 4 "
            "(the nearest width is 128 or 136; in 9 arms, first 'a0')"
        )
    ]


def test_what_an_alias_repeats_is_reported_once_where_it_was_written(problems):
    text = HEAD + "base:\n  model: &small {width: 64, layers: two}\n  resources: &r {cpus: !x 1}\n"
    text += "arms:\n  a:\n    model: {<<: *small, heads: 2}\n    resources: *r\n"
    assert problems(text) == [
        "5:37: base.model.layers: expected a whole number, got 'two'",
        "6:24: base.resources.cpus: the tag !x has no meaning here (leave it out)",
    ]


if __name__ == "__main__":
    for study in FILES:
        try:
            load_study(study)
        except UserError as error:
            faults = [str(problem).removeprefix(f"{study}:").lstrip() for problem in error.problems]
            study.with_suffix(".txt").write_text("".join(f"{fault}\n" for fault in faults), encoding="utf-8")
