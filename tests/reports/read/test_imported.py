"""The run store of imported runs: what is pooled, what is refused, and that it can be done again."""

import dataclasses
import json
import re

import numpy as np
import pytest
from scipy import stats

from ablate.base.errors import UserError
from ablate.base.files import write_record
from ablate.reports import write_report
from ablate.reports.findings.analyse import analyse
from ablate.reports.read.imported import ImportedRun, ImportedStudy, run_of_losses, tidied, write_study
from ablate.reports.read.rebase import read_against
from ablate.reports.words.caveats import warnings
from ablate.reports.words.cost_tables import measured_table
from ablate.reports.words.tables import design_table
from ablate.reports.words.verdict import write_verdict
from ablate.results.frames import load_frames
from ablate.store import StudyStore
from ablate.store.plan_file import Target


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
        (study(a=[run(0, 4, 2)], b=[run(0, 4, 2)]), "log 0 is in arm 'a' and in arm 'b' .expected one"),
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


def test_pairs_need_seeds(tmp_path):
    made = dataclasses.replace(study(a=[run(0, 4, 2)], b=[run(None, 4, 3)]), paired_seeds=True)
    with pytest.raises(
        UserError, match=r"--paired: log None \(arm 'b'\) tells no seed, so it has no pair: name"
    ):
        write_study(made, tmp_path / "s")
    made = dataclasses.replace(made, arms={"a": [run(0, 4, 2), run(0, 4, 3)]})
    with pytest.raises(
        UserError, match=r"--paired: arm 'a' has several runs of seed 0 \(leave --paired out\)"
    ):
        write_study(made, tmp_path / "s")
    made = dataclasses.replace(made, arms={"a": [run(0, 4, 2), run(1, 4, 3)], "b": [run(2, 4, 2)]})
    with pytest.raises(UserError, match=r"--paired: no arm has a seed of 'a', so it pairs nothing"):
        write_study(made, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_runs_without_a_seed_get_a_free_number(tmp_path):
    runs = [run(None, 4, 2), run(0, 4, 2.1), run(None, 4, 2.2), run(2, 4, 2.3)]
    store, _ = write_study(study(a=runs), tmp_path / "s")
    assert [one.seed for one in store.plan().arms[0].runs] == [1, 0, 3, 2]


def test_a_diverged_run_counts_with_the_longest_of_the_study(tmp_path):
    # Two of four diverge after one evaluation of ten: as if that had been their budget, the arm looked cheap.
    long = [4.5, 4.4, 4.3, 4.2, 4.1, 4.0, 3.9, 3.8, 3.7, 2.9]
    base = [run(seed, *long) for seed in range(4)]
    arm = [run(seed, 4.5, state="diverged") for seed in (4, 5)] + [run(seed, *long) for seed in (6, 7)]
    store, _ = write_study(study(a=base, b=arm), tmp_path / "s")
    analysis = analyse(load_frames(store))
    (cost,) = [arm.token_cost for arm in analysis.others]
    assert (cost.kind, cost.reason) == ("bound", "this arm: of 4 runs 2 diverged")
    assert cost.low == pytest.approx(0, abs=0.01)
    assert [run.tokens for run in analysis.others[0].runs] == [1000, 1000, 10_000, 10_000]


def precision(linear, attn="bf16"):
    parts = {"linear": linear, "attn": attn}
    return {f"lowest_numerical_precision_in_{part}": value for part, value in parts.items()}


def test_precision_is_the_recipe_and_never_pooled(tmp_path):
    mixed = [run(0, 4, 2, settings=precision("fp8")), run(1, 4, 2, settings=precision("nvfp4"))]
    with pytest.raises(UserError, match=r"its runs differ in lowest_numerical_precision_in_linear"):
        write_study(study(a=mixed), tmp_path / "s")
    store, _ = write_study(study(a=mixed[:1], b=mixed[1:]), tmp_path / "s")
    analysis = analyse(load_frames(store))
    assert [arm.recipe for arm in analysis.arms] == [
        "as logged: linear fp8, attn bf16", "as logged: linear nvfp4, attn bf16",
    ]  # fmt: skip
    assert "lowest_numerical_precision_in_linear: fp8 → nvfp4" in str(design_table(analysis).rows)
    assert not [text for text in warnings(analysis, ()) if "not trained as" in text]


H100, B200 = ({"hardware": f"8x NVIDIA {name}"} for name in ("H100", "B200"))


def timed(seed, *losses, speed=1000.0, **other):
    return run(seed, *losses, throughput=((1000, speed * (1 + seed / 1000)),), **other)


def measured(tmp_path, hardware=None, **arms):
    made = dataclasses.replace(study(**arms), hardware=hardware)
    store, _ = write_study(made, tmp_path / "s")
    analysis = analyse(load_frames(store))
    return analysis, [arm.measured for arm in analysis.arms], " ".join(write_verdict(analysis).sentences)


def test_speed_as_logged_on_equal_hardware(tmp_path):
    slow = [timed(seed, 4, 3.5, 2.5 + seed / 100, settings=H100) for seed in (0, 1, 2)]
    fast = [timed(seed, 4, 3.5, 3.2, 2.5 + seed / 100, speed=2000, settings=H100) for seed in (3, 4, 5)]
    analysis, (_, found), text = measured(tmp_path, a=slow, b=fast)
    (cost,) = [arm.token_cost for arm in analysis.others]
    assert found.timed == "as logged"
    assert found.throughput.estimate == pytest.approx(2 * 1.004 / 1.001, rel=1e-4)
    assert found.end_to_end.estimate == pytest.approx(found.throughput.estimate / (1 + cost.estimate))
    assert found.end_to_end.low < found.end_to_end.estimate < found.end_to_end.high
    assert "the speed of a (timed: as logged)" in text
    assert "Speed as logged, where it is given, is of the same kind and number of devices" in text
    table = measured_table(analysis, {"H100": 2.0})
    assert "native" not in table.caption
    assert "Cost at 2 $/h" in table.columns
    # 8 devices: the hours are of all of them together.
    hours = [8 * run.tokens_to_target / run.tokens_per_sec / 3600 for run in analysis.others[0].runs]
    assert found.hours.estimate == pytest.approx(sum(hours) / 3, rel=1e-3)


@pytest.mark.parametrize(
    ("base", "arm", "why"),
    [
        (H100, B200, "b was trained on 8x NVIDIA B200, a on 8x NVIDIA H100"),
        (H100, {"hardware": "16x NVIDIA H100"}, "b was trained on 16x NVIDIA H100, a on 8x NVIDIA H100"),
        ({}, B200, "the logs of a do not tell one kind and number of devices (`ablate import --hardware`)"),
        (H100, {}, "the logs of b do not tell one kind and number of devices"),
        ({}, {}, "the logs of a do not tell one kind and number of devices"),
    ],
)
def test_no_speed_where_the_logs_do_not_say_equal_hardware(tmp_path, base, arm, why):
    arms = {"a": [timed(0, 4, 2, settings=base)], "b": [timed(1, 4, 2, settings=arm)]}
    analysis, found, text = measured(tmp_path, **arms)
    assert [arm.n for arm in analysis.arms] == [1, 1]  # tokens are compared all the same
    assert found[1] is None
    assert f"no claim on speed is made: {why}" in text


def test_speed_as_logged_against_another_arm(tmp_path):
    runs = {
        name: [timed(i, 4, 2, settings=own)]
        for i, (name, own) in enumerate(zip("abc", (B200, H100, H100), strict=True))
    }
    store, _ = write_study(study(**runs), tmp_path / "s")
    measured = {
        arm.name: arm.measured for arm in analyse(read_against(load_frames(store), baseline="b")).arms
    }
    assert [name for name, found in measured.items() if found] == ["b", "c"]


def test_the_user_may_say_the_hardware_but_not_against_a_log(tmp_path):
    arms = {"a": [timed(0, 4, 2)], "b": [timed(1, 4, 2)]}
    assert measured(tmp_path, "8x NVIDIA H100", **arms)[1][1].timed == "as logged"
    with pytest.raises(
        UserError, match=r"--hardware: log 2 was trained on 8x NVIDIA B200 \(leave the option out"
    ):
        measured(tmp_path, "8x NVIDIA H100", a=[timed(0, 4, 2)], b=[timed(2, 4, 2, settings=B200)])
    with pytest.raises(UserError, match="--hardware: expected NUMBERx NAME"):
        measured(tmp_path, "H100", **arms)
    _, found, text = measured(tmp_path, "8x NVIDIA H100", a=arms["a"], b=[run(3, 4, 2)])
    assert found[1] is None
    assert "no claim on speed is made: the logs tell no time to set b beside it" in text


def test_final_losses_alone(tmp_path):
    losses = {"a": (3.0, 3.01, 3.02), "b": (3.1, 3.12, 3.11), "c": (3.01, 3.0, 3.03), "d": (3.0,)}
    arms = {
        name: [dataclasses.replace(run(seed, loss), evals=((0, loss),), content=f"{name}{seed}".encode())
               for seed, loss in enumerate(own)]
        for name, own in losses.items()
    }  # fmt: skip
    arms["d"].append(dataclasses.replace(run(9), state="diverged", content=b"d9"))
    with pytest.raises(UserError, match="--target: the logs hold final losses alone"):
        write_study(study(**arms), tmp_path / "s")
    store, _ = write_study(dataclasses.replace(study(**arms), target=None), tmp_path / "s")
    assert store.plan().target is None
    report = write_report(store)
    lead, *sentences = report.verdict.sentences
    assert lead == "Final loss of 3 arms against a: above it (1), not settled (1) and cannot be judged (1)."
    # Welch's interval, with an arm's variance as if the two arms' mean were known from one more degree.
    a, b, c = (np.var(losses[name], ddof=1) for name in "abc")
    parts = np.array([((b + c) / 2 + 2 * b) / 3 / 3, a / 3])
    degrees = min(6, parts.sum() ** 2 / (parts**2 / [3, 2]).sum())
    low, high = stats.t.interval(0.95, degrees, loc=0.1, scale=np.sqrt(parts.sum()))
    brackets = f"[+{low:.4f}, +{high:.4f}] nats/token, n\u00a0=\u00a03."
    assert sentences[0] == f"b ends above a: +0.1000 {brackets}"
    assert sentences[1].startswith("c is inconclusive against a: +0.0033 [")
    assert sentences[2] == "For d no loss difference can be given (1 of 2 runs diverged: no final loss)."
    page = report.markdown.read_text()
    assert not re.search("token cost|budget|break-even|tokens to target|ablate run", page, re.IGNORECASE)
    content = json.loads(report.json.read_text())
    assert content["target"] is None
    assert [arm["token_cost"]["kind"] for arm in content["arms"]] == ["baseline", "none", "none", "none"]
    assert {run["end"] for arm in content["arms"][:3] for run in arm["runs"]} == {"ended"}
    with pytest.raises(UserError, match="--target: study 's' has no curves to read it on"):
        write_report(store, target=3.0)


def test_curves_without_a_target(tmp_path):
    arms = {"a": [run(0, 4, 3), run(1, 4, 3.1)], "b": [run(2, 4, 3.5), run(3, 4, 3.55)]}
    store, _ = write_study(dataclasses.replace(study(**arms), target=None), tmp_path / "s")
    report = write_report(store)
    assert report.verdict.sentences[1].startswith("b ends above a: +0.4750 [")
    assert (report.figures / "convergence.svg").exists()
    other = write_report(store, tmp_path / "other", target=3.6)
    assert "compared with a at a validation loss of 3.6 nats/token" in other.verdict.count


def test_the_page_of_logs_does_not_tell_to_train(tmp_path):
    store, _ = write_study(study(a=[run(0, 4, 2)], b=[run(1, 4, 2)]), tmp_path / "s")
    report = write_report(store)
    for page in (report.markdown, report.html):
        assert "ablate run" not in page.read_text()
        assert "ablate import" in page.read_text()


def test_a_rate_that_is_said_to_be_constant_lets_crossings_be_read_off_a_fit(tmp_path):
    arms = {"a": [stretched(seed, 1.0, 1000) for seed in (0, 1)], "b": [stretched(2, 1.2, 1000)]}
    made = dataclasses.replace(study(**arms), target=Target(kind="val_loss", value=1.2))
    for told, fitted in ((None, False), (60_000, True), (900_000, False)):
        store, _ = write_study(dataclasses.replace(made, constant_from=told), tmp_path / "s")
        analysis = analyse(load_frames(store))
        assert {run.fitted is not None for arm in analysis.arms for run in arm.runs} == {fitted}
        assert any("schedule is not known" in text for text in warnings(analysis, ())) == (told is None)
    settings = {"opt_learning_rate_decay_schedule": "cosine"}
    odd = dataclasses.replace(made, arms={"a": [run(0, 4, 2, settings=settings)]}, constant_from=0)
    with pytest.raises(
        UserError, match="--constant-from: log 0 tells opt_learning_rate_decay_schedule cosine"
    ):
        write_study(odd, tmp_path / "t")


def stretched(seed, by, last):
    """Return a log whose curve is stretched to its budget of ``last`` thousand tokens."""
    at = np.arange(50, last + 1, 50)
    evals = tuple((1000 * int(t), float(5 - 0.6 * np.log(t / by) + 0.001 * seed)) for t in at)
    return dataclasses.replace(run(seed), evals=evals, content=repr((seed, by, last)).encode())


def test_a_cost_that_unequal_budgets_alone_may_make_is_named(tmp_path):
    arms = {
        "short": [stretched(seed, 1.0, 1000) for seed in (0, 1)],
        "long": [stretched(seed, 1.09, 1100) for seed in (2, 3)],
        "slow": [stretched(seed, 1.3, 1100) for seed in (4, 5)],
    }
    made = dataclasses.replace(study(**arms), target=Target(kind="val_loss", value=1.0))
    store, _ = write_study(made, tmp_path / "s")
    text = " ".join(warnings(analyse(load_frames(store)), ())).replace("\u00a0", " ")
    assert "The learning rate's schedule is not known" in text
    assert "the cost is no greater than that: long (+10.0 % of budget, +9." in text
    assert "or is not known" in text
    assert "slow" not in text.split("no greater than that")[1].split("stretches")[0]


def test_a_run_at_the_target_before_it_began_is_a_bound_and_no_error(tmp_path):
    begun = [
        dataclasses.replace(run(seed), evals=((0, 2.9), (1000, 2.5)), content=b"%d" % seed) for seed in (0, 1)
    ]
    store, _ = write_study(study(a=begun, b=[run(2, 4, 2), run(3, 4, 2.5)]), tmp_path / "s")
    for rule in ("confirmed", "first_eval"):
        plan = store.plan()
        store.write_plan(dataclasses.replace(plan, target=dataclasses.replace(plan.target, crossing=rule)))
        report = write_report(store)
        assert "b" in " ".join(report.verdict.sentences)
        found = {arm.name: arm for arm in analyse(load_frames(store)).arms}
        assert found["b"].token_cost.estimate is None
        assert found["b"].token_cost.low is None


def piece(name, evals, *, run="", seed=None):
    return run_of_losses(dict(evals), [name], source=name, seed=seed, piece=(run, seed))


CURVE = [(at, 5.0 - at / 100) for at in range(0, 200, 10)]


@pytest.mark.parametrize("told", [{"seed": 3}, {"run": "r"}, {"seed": "s3"}])
@pytest.mark.parametrize("rest", [CURVE[10:], CURVE[7:]])
def test_pieces_of_one_run_are_joined(told, rest):
    runs = [piece("b", rest, **told), piece("a", CURVE[:10], **told), piece("c", CURVE, run="other", seed=9)]
    joined, said = tidied({"arm": runs}, ())
    assert said[0] == "a and b are pieces of one run of arm 'arm': joined"
    assert sorted((run.source, run.evals) for run in joined["arm"]) == [
        ("a, b", tuple(CURVE)), ("c", tuple(CURVE)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ([(90, 4.0), (100, 4.0)], "are of one run by their name or seed, and say 4.1 and 4 "),
        ([(85, 4.0), (105, 4.0)], "and the second begins before the first ends, at other tokens"),
    ],
)  # fmt: skip
def test_pieces_that_disagree_are_refused(rest, said):
    with pytest.raises(UserError, match=said):
        tidied({"arm": [piece("a", CURVE[:10], seed=1), piece("b", rest, seed=1)]}, ())


def test_a_file_without_a_name_that_begins_late_is_a_piece_or_refused():
    firsts = [piece("a", CURVE[:10]), piece("c", [(at, loss + 1) for at, loss in CURVE[:10]])]
    joined, said = tidied({"arm": [*firsts, piece("b", CURVE[8:])]}, ())
    assert [run.source for run in joined["arm"]] == ["c", "a, b"]
    assert said == ["a and b are pieces of one run of arm 'arm': joined"]
    late = piece("d", CURVE[10:])
    with pytest.raises(
        UserError, match="d begins at 100 tokens, a of the same arm 'arm' at 0: is it the rest"
    ):
        tidied({"arm": [*firsts, late]}, ())
    assert len(tidied({"arm": [*firsts, late]}, ("beginning",))[0]["arm"]) == 3


def test_seeds_that_are_text_get_numbers_and_arms_that_differ_in_case_are_named():
    def seeds(*texts):
        runs = [piece(text, [(1, float(n))], seed=text) for n, text in enumerate(texts)]
        arms, said = tidied({"Arm": runs, "arm": [piece("x", [(1, 9.0)], seed=4)]}, ())
        assert said[0] == "arms Arm and arm differ in case alone: taken as several"
        return [run.seed for run in arms["Arm"]], said[1]

    assert seeds("s0", "s10") == ([0, 10], "seeds 's0' = 0, 's10' = 10")
    assert seeds("s3", "s4") == ([0, 1], "seeds 's3' = 0, 's4' = 1")  # 4 is taken
    assert seeds("b", "a") == ([1, 0], "seeds 'a' = 0, 'b' = 1")
