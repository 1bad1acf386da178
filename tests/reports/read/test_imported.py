"""The run store of imported runs: what is pooled, what is refused, and that it can be done again."""

import dataclasses

import pytest

from ablate.base.errors import UserError
from ablate.base.files import write_record
from ablate.reports.findings.analyse import analyse
from ablate.reports.read.imported import ImportedRun, ImportedStudy, write_study
from ablate.reports.read.load import load_frames
from ablate.reports.words.caveats import warnings
from ablate.store import StudyStore
from ablate.store.lock import Target


def run(seed, *losses, settings=None, **other):
    return ImportedRun(
        source=f"log {seed}", content=repr((seed, losses)).encode(), seed=seed,
        evals=tuple((1000 * n, loss) for n, loss in enumerate(losses, 1)),
        settings={"batch": 16} if settings is None else settings, **other,
    )  # fmt: skip


def study(**arms):
    return ImportedStudy(
        name="s", arms=arms, baseline=next(iter(arms)), target=Target(kind="val_loss", value=3.0)
    )


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_it_is_an_ordinary_run_store(tmp_path):
    made = study(fp8=[run(0, 4, 2), run(1, 4, 2.5)], fp4=[run(2, 5, 4, 2), run(3, 5, 3.5, 2)])
    store, faults = write_study(made, tmp_path / "s")
    assert faults == []
    analysis = analyse(load_frames(store))
    assert [(arm.name, arm.hit) for arm in analysis.arms] == [("fp8", 2), ("fp4", 2)]
    assert analysis.timing.kind == "logged"
    assert analysis.others[0].token_cost.estimate > 0


def test_a_second_import_writes_the_same_and_forgets_what_is_gone(tmp_path):
    made = study(fp8=[run(0, 4, 2)], fp4=[run(1, 5, 2)])
    write_study(made, tmp_path / "s")
    first = {path: content for path, content in files(tmp_path).items() if path.name != "status.json"}
    write_study(study(fp8=[run(0, 4, 2), run(9, 4, 2)], fp4=[run(1, 5, 2)]), tmp_path / "s")
    write_study(made, tmp_path / "s")
    again = {path: content for path, content in files(tmp_path).items() if path.name != "status.json"}
    assert first == again


def test_another_study_of_that_name_is_left_alone(tmp_path):
    store = StudyStore(tmp_path / "s")
    write_record(store.plan_path, {"format": 1, "study": "s", "arms": []})
    before = files(tmp_path)
    with pytest.raises(UserError, match="holds a study that was not imported: choose another --study"):
        write_study(study(a=[run(0, 4, 2)]), tmp_path / "s")
    assert files(tmp_path) == before


def test_runs_of_an_arm_must_agree_unless_waived(tmp_path):
    odd = run(2, 4, 2, settings={"batch": 32})
    made = study(fp8=[run(0, 4, 2), run(1, 4, 2.1), odd])
    with pytest.raises(
        UserError, match=r"its runs differ in batch \(32 in log 2, 16 in most\) .* --waive batch"
    ):
        write_study(made, tmp_path / "s")
    assert not (tmp_path / "s").exists()
    store, _ = write_study(dataclasses.replace(made, waived=("batch",)), tmp_path / "s")
    assert len(load_frames(store).runs) == 3


def test_settings_in_which_arms_differ_are_shown(tmp_path):
    store, _ = write_study(study(a=[run(0, 4, 2)], b=[run(1, 4, 2, settings={"batch": 32})]), tmp_path / "s")
    assert analyse(load_frames(store)).others[0].planned.differs == {"batch": (16, 32)}


def test_a_copy_of_a_log_counts_once(tmp_path):
    store, faults = write_study(study(a=[run(0, 4, 2), run(0, 4, 2)]), tmp_path / "s")
    assert faults == ["log 0: same content as log 0 (arm 'a'): counted once"]
    assert len(load_frames(store).runs) == 1


@pytest.mark.parametrize(
    ("made", "line"),
    [
        (study(a=[run(0, 4, 2)], b=[]), "arm 'b' has no run that could be read"),
        (dataclasses.replace(study(a=[run(0, 4, 2)]), baseline="c"), r"--baseline: no arm 'c' \(arms: a\)"),
    ],
)
def test_what_makes_no_study(tmp_path, made, line):
    with pytest.raises(UserError, match=line):
        write_study(made, tmp_path / "s")


def test_diverged_and_cut_runs_end_as_they_did(tmp_path):
    runs = [run(0, 4, 2), run(1, 4, 4.5, state="diverged"), run(2, 4, state="interrupted"), run(3, 4, 3.5)]
    store, _ = write_study(study(a=runs), tmp_path / "s")
    arm = analyse(load_frames(store)).arms[0]
    assert (arm.hit, arm.censored, arm.diverged, arm.missing) == (1, 1, 1, 1)


def test_arms_that_were_trained_otherwise_are_a_caution(tmp_path):
    settings = {"batch": 32, "submission_platform": "theirs"}
    store, _ = write_study(study(a=[run(0, 4, 2)], b=[run(1, 4, 2, settings=settings)]), tmp_path / "s")
    (caution,) = [text for text in warnings(analyse(load_frames(store)), ()) if "not trained as" in text]
    assert caution.startswith("b was not trained as a was: batch (16 there, 32 here). What it costs is not")
