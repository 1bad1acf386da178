"""Any curve, in the log of any trainer, comes back as it was, or is refused."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate.base.errors import UserError
from ablate.execute.command_log import Rows
from ablate.reports.read.rows import read_csv
from ablate.reports.read.tables import Reading, runs_of_log, runs_of_table
from ablate.run.command import Command
from ablate.run.log_formats import FORMATS
from ablate.run.log_rows import LogReader, LogSource
from ablate.run.log_text import NewText
from tests.run.writers import BLANKS, LINES, WRITERS, packed
from tests.run.writers import csv as write_csv

PACKED = ("plain", "crlf", "utf-16", "mark", "gzip")


@st.composite
def curves(draw):
    """Return evaluations by step, and how often training is logged; neighbours may be equal."""
    every = draw(st.sampled_from([10, 25]))
    apart = every * draw(st.integers(2, 8))
    falls = draw(st.lists(st.integers(0, 900), min_size=5, max_size=20))
    curve = {}
    loss = 80_000
    for number, fall in enumerate(falls, 1):
        loss -= fall
        curve[number * apart] = loss / 10_000
    return curve, every


def read(path, name):
    reading = Reading(stages=((0, 1),), is_repeated=FORMATS[name].repeats)
    faults = []
    runs = runs_of_log(path, LogSource(preset=name, file=""), faults, reading)
    assert faults == []
    (run,) = runs[None]
    return run


def by_step(run, name):
    size = 4096 if name == "olmo" else 1  # OLMo counts tokens itself
    return {tokens // size: loss for tokens, loss in run.evals}


@pytest.mark.parametrize("name", WRITERS)
@given(drawn=curves(), how=st.sampled_from(PACKED))
def test_a_curve_comes_back_from_the_log_of_a_trainer(tmp_path, name, drawn, how):
    curve, every = drawn
    path = tmp_path / "log"
    path.write_bytes(packed(WRITERS[name](curve, every), how))
    try:
        run = read(path, name)
    except UserError:
        assert FORMATS[name].repeats, (
            "only a trainer that repeats evaluations leaves it open"
        )
    else:
        assert (by_step(run, name), run.state) == (curve, "finished")


@pytest.mark.parametrize("name", LINES)
@given(drawn=curves(), part=st.floats(0.3, 0.9), shift=st.integers(1, 9))
def test_what_a_resumed_run_says_again_replaces_what_it_said(
    tmp_path, name, drawn, part, shift
):
    curve, every = drawn
    steps = [*curve]
    # there it ended; it went on from two evaluations before
    last = max(1, int(part * len(steps)))
    begin = steps[max(0, last - 2)]
    until = {step: curve[step] for step in steps[: last + 1]}
    again = {step: curve[step] - shift / 1000 for step in steps if step > begin}
    first = WRITERS[name](until, every)
    rest = WRITERS[name](again, every, begin)
    path = tmp_path / "log"
    path.write_bytes(packed([*first, f"resuming from {begin}", *rest], "plain"))
    try:
        run = read(path, name)
    except UserError:
        return  # it may be several runs
    assert by_step(run, name) == pytest.approx(curve | again, abs=1e-6)
    assert any(note.startswith("resumed: ") for note in run.notes)


def read_table(path, lines):
    path.write_text("\n".join(lines))
    reading = Reading(names={"step": "step"}, stages=((0, 1),))
    (run,) = runs_of_table(path, read_csv(path, faults := []), faults, reading)[None]
    return dict(run.evals), run.state, faults


@given(drawn=curves(), blank=st.sampled_from(BLANKS), after=st.integers(0, 3))
def test_blanks_of_a_table_are_no_evaluations(tmp_path, drawn, blank, after):
    curve, every = drawn
    lines = [*write_csv(curve, every, blank)]
    lines += [f"{max(curve) + number},1.0,{blank}" for number in range(1, after + 1)]
    assert read_table(tmp_path / "log.csv", lines) == (curve, "finished", [])


@given(
    drawn=curves(),
    bad=st.sampled_from(["nan", "inf"]),
    blank=st.sampled_from(["nan", ""]),
)
def test_evaluations_that_end_in_no_number_are_a_divergence(
    tmp_path, drawn, bad, blank
):
    curve, every = drawn
    last = max(curve)
    lines = [*write_csv(curve, every, blank)]
    lines += [f"{last + step},1.0,{bad}" for step in range(every, last, every)]
    assert read_table(tmp_path / "log.csv", lines) == (curve, "diverged", [])


@pytest.mark.parametrize("name", LINES)
@given(drawn=curves(), how=st.sampled_from(["plain", "crlf", "mark"]))
def test_a_command_that_prints_a_log_has_the_same_evaluations(
    tmp_path, make_config, name, drawn, how
):
    curve, every = drawn
    path = tmp_path / "log"
    path.write_bytes(packed(WRITERS[name](curve, every), how))
    source = LogSource(preset=name)
    config = make_config(
        tokens=max(curve) * 4096, seq_len=512, batch_size=8, divergence_loss=9.0
    )
    config = replace(config, trainer=Command(command=["x"], metrics=source))
    written = []
    rows = Rows(config, (), written.append, 1)
    reader = LogReader(source)
    for line in NewText(path).new(ended=True):
        for row in reader.rows(line):
            assert rows.add(row, is_new=True) is None
    evaluations = {}
    for row in written:
        assert row["tokens"] == row["step"] * 4096
        if row["kind"] == "eval":
            evaluations[row["step"]] = row["val_loss"]
    assert evaluations == curve
    assert rows.missing() is None
