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
arms: {a: , b: {trainer: {cwd: b}}}
"""
TESTED = STUDY.replace("trainer: {cwd: b}", "code: b")


@pytest.mark.parametrize("name", ["train.py", "helper.py", "set.yaml", "new.py"])
def test_other_code_is_refused_unless_it_is_declared(plan, tmp_path, name):
    for folder in "ab":
        (tmp_path / folder).mkdir()
        for file in ("train.py", "helper.py", "set.yaml"):
            (tmp_path / folder / file).touch()
    with pytest.raises(UserError, match="arm 'b' is the same as arm 'a'"):
        plan(TESTED)
    ids = set()
    for content in ("other", "another"):
        (tmp_path / "b" / name).write_text(content)
        with pytest.raises(UserError) as refused:
            plan(STUDY)
        assert f"7:32: arm 'b' runs other code than the baseline: {name} (" in str(
            refused.value
        )
        tested = plan(TESTED)
        assert tested.arm("b").differs == {"code": (None, "b")}
        ids |= {arm.runs[0].id for arm in tested.arms}
    assert len(ids) == 3
    if name == "train.py":  # which has ids of its own by its words
        plan(f"{STUDY}waive: [code]\n")
