"""Arms that run other code than the baseline say so, or are refused before anything is trained."""

from __future__ import annotations

import pytest

from ablate.base.errors import UserError

STUDY = """\
name: s
baseline: a
target: {val_loss: 3.3}
seeds: 1
base:
  trainer: {command: [run, train.py, "--set=set.yaml", "{seed}"], metrics: {preset: megatron}, cwd: a}
arms:
  a: {trainer: {precision: x}}
  b: {trainer: {precision: y, cwd: b}}
"""
TESTED = STUDY.replace("precision: y, cwd: b}", "precision: y}, code: b")
SAME = STUDY.replace("{precision: y, cwd: b}", "{precision: x}, code: b")
REFUSED = "study.yaml:9:36: arm 'b' runs other code than the baseline: "


@pytest.fixture
def ids(plan, tmp_path):
    """Plan a study whose arm ``b`` has files of other content; return the arms' ids."""
    for folder in "ab":
        (tmp_path / folder).mkdir()
        for name in ("train.py", "helper.py", "set.yaml"):
            (tmp_path / folder / name).write_text(name)

    def make(text, **files):
        for name, content in files.items():
            (tmp_path / "b" / name.replace("_", ".")).write_text(content)
        return [arm.runs[0].id for arm in plan(text).arms]

    return make


@pytest.mark.parametrize("name", ["train_py", "helper_py", "set_yaml", "new_py"])
def test_other_code_is_refused_unless_it_is_declared(ids, name):
    shared, same = ids(STUDY)
    assert ids(TESTED) == [shared, same]
    with pytest.raises(UserError) as refused:
        ids(STUDY, **{name: "other"})
    assert f"{REFUSED}{name.replace('_', '.')} (" in str(refused.value)
    assert "code: DIR" in str(refused.value)
    assert ids(STUDY + "waive: [code]\n")[0] == shared
    first = ids(TESTED)
    second = ids(TESTED, helper_py="and another")
    assert first[0] == second[0] == shared
    assert len({same, first[1], second[1]}) == 3


def test_code_that_is_the_baselines_is_no_arm(ids):
    with pytest.raises(UserError, match="arm 'b' is the same as arm 'a'"):
        ids(SAME)
    assert len({*ids(SAME, helper_py="other")}) == 2


def test_many_files_are_counted_and_code_is_the_difference(ids, plan):
    with pytest.raises(UserError, match=r"n0\.py, .*n4\.py and 2 more \("):
        ids(STUDY, **{f"n{i}_py": "" for i in range(7)})
    assert plan(SAME).arm("b").differs == {"code": (None, "b")}
