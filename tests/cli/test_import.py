"""``ablate import``: from logs to a report. What it refuses: ``refusals.yaml``."""

import json
import shlex
from pathlib import Path

import pytest

from tests.cli.command import ablate

HEAD = "tokens,val_loss,seed\n"
ROWS = [
    (seed, f"{n * 1000},{5 - n * pace},{seed}\n")
    for seed, pace in enumerate((0.5, 0.52, 0.49))
    for n in range(1, 6)
]
TEXT = HEAD + "".join(row for _, row in ROWS)
COMMON = "--study s --baseline fp8 --target val_loss=3.5"
CSV = f"csv --arm fp8=fp8.csv --arm fp4=fp4.csv {COMMON}"


@pytest.fixture
def logs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("fp8.csv").write_text(TEXT)
    Path("fp4.csv").write_text(TEXT.replace("1000,", "1100,").replace("2000,", "2200,"))


@pytest.fixture
def imported(logs):
    """Return a function that imports with these words, and returns what was said."""

    def call(words, code=0):
        ended = ablate("import", *shlex.split(words), cwd=Path())
        assert ended.code == code, ended
        return ended.out + ended.err

    return call


def report(name="s"):
    return json.loads(ablate("report", name, "--json", cwd=Path()).out)


def test_csv_to_report_and_its_evaluations_to_the_same_study_again(imported):
    assert "fp8: 3 runs, 15 evaluations\nfp4: 3 runs, 15 evaluations" in imported(f"{CSV} --paired")
    first = report()
    assert [arm["n"] for arm in first["arms"]] == [3, 3]
    assert first["timing"] == "logged"
    assert "6 of 6 done" in ablate("status", "s", cwd=Path()).out
    [table] = Path("runs/s/report").rglob("evaluations.csv")
    table.rename("theirs.csv")
    imported("csv theirs.csv --study again --baseline fp8 --target val_loss=3.5 --paired")
    for was, now in zip(first["arms"], report("again")["arms"], strict=True):
        assert all(now[key] == was[key] for key in ("name", "token_cost", "final_loss"))


def test_names_that_steer_a_terminal_or_a_page_are_visible_text_in_every_file(imported):
    red, reversed_ = "fp8\x1b[31m", "\u202efp4"
    arms = f"'--arm={red}=fp8.csv' '--arm={reversed_}=fp4.csv' '--baseline={red}'"
    said = imported(f"csv {arms} --study s --target val_loss=3.5")
    assert "fp8\\x1b[31m: 3 runs, 15 evaluations\n\\u202efp4: 3 runs" in said
    report()
    written = [path for path in Path("runs/s").rglob("*.*") if path.suffix not in (".png", ".db", "")]
    assert {path.suffix for path in written} >= {".md", ".csv", ".json", ".html"}
    for path in written:
        assert not {"\x1b", "\u202e"} & set(path.read_text()), path


def test_several_files_with_a_column_of_arms(imported):
    for seed in range(3):
        rows = [f"{row[:-1]},{arm}\n" for arm in ("fp8", "fp4") for of, row in ROWS if of == seed]
        Path(f"seed{seed}.csv").write_text("".join([HEAD[:-1], ",arm\n", *rows]))
    said = imported(f"csv seed0.csv seed1.csv seed2.csv {COMMON}")
    assert "fp8: 3 runs, 15 evaluations\nfp4: 3 runs, 15 evaluations" in said


def test_faults_are_named_the_rest_goes_on_and_the_exit_code_says_so(imported):
    Path("fp8.csv").write_text(f"{TEXT}6000,broken,0\n")
    assert "fp8.csv:17: expected a number in 'val_loss', got 'broken'" in imported(CSV, code=1)
    assert report()["arms"][0]["n"] == 3


def test_jsonl_and_wandb(imported):
    rows = (json.dumps({"tokens": n, "val_loss": 5 - n}) + "\n" for n in (1, 2, 3))
    Path("a.jsonl").write_text("".join(rows))
    imported(f"jsonl --arm fp8=a.jsonl {COMMON}")
    Path("chart.csv").write_text('"Step","fp8-0 - l","fp4-0 - l"\n1,4,5\n2,3,4\n3,2,3\n')
    chart = "wandb-export chart.csv --arm 'fp8=fp8-*' --arm 'fp4=fp4-*' --tokens-per-step 1000"
    assert "fp4: 1 runs, 3 evaluations" in imported(f"{chart} {COMMON}")


def test_folders_are_searched_and_several_make_an_arm(imported):
    for number, place in enumerate(("b/deep/er", "b", "a")):
        Path(place).mkdir(parents=True, exist_ok=True)
        Path(place, "log.csv").write_text("".join([HEAD, *(row for seed, row in ROWS if seed == number)]))
    Path("b/.hidden.csv").write_text("nothing")
    Path("b/notes.md").write_text("nothing")
    said = imported(f"csv --arm fp8=b --arm fp8=a --arm fp4=fp4.csv {COMMON}")
    assert "b: 2 files like *.csv, 1 others not read\na: 1 files like *.csv, 0 others not read\n" in said
    plan = json.loads(Path("runs/s/plan.lock.json").read_text())
    assert [run["seed"] for run in plan["arms"][0]["runs"]] == [0, 1, 2]  # b/deep/er before b/log.csv


def test_plain_text_to_report(imported):
    for number, place in enumerate(("old", "old", "new", "new")):
        Path(place).mkdir(exist_ok=True)
        lines = (
            f"step:{n}/400 val_loss:{loss} train_time:{n}ms\n" for n, loss in ((0, 9), (200, 4), (400, 3))
        )
        Path(place, f"{number}.txt").write_text("".join([f"a line\nseed {number}\n", *lines]))
    patterns = (
        r"--pattern 'step:(?P<step>\d+)/\d+ val_loss:(?P<val_loss>\S+) train_time:(?P<ms>\d+)ms' "
        r"--pattern 'seed (?P<seed>\d+)'"
    )
    sizes = "--tokens-per-step 10 --tokens-per-step fp4=0:10,200:20 --hardware '2x NVIDIA H100'"
    imported(f"text --arm fp8=old --arm fp4=new {patterns} {sizes} {COMMON}")
    fp8, fp4 = report()["arms"]
    assert [(run["seed"], run["tokens"]) for run in fp8["runs"]] == [(0, 4000), (1, 4000)]
    assert [run["tokens"] for run in fp4["runs"]] == [6000, 6000]
    assert fp4["token_cost"]["estimate"] == pytest.approx(1.5**0.5 - 1)  # half-way in ln tokens
    assert fp4["measured"]["timed"] == "as logged"
    # As many steps in as much time: what they cost more in tokens, they have more throughput.
    assert fp4["measured"]["throughput_over_baseline"]["estimate"] == pytest.approx(1.5)
    assert fp4["measured"]["end_to_end_speed"]["estimate"] == pytest.approx(1.5**0.5)


def test_final_losses_to_report(imported):
    rows = ("a,0,3.0", "a,1,3.01", "b,0,3.5", "b,1,3.51")
    Path("final.csv").write_text("\n".join(["arm,seed,val_loss", *rows]))
    imported("csv final.csv --study s --baseline a")
    said = ablate("report", "s", cwd=Path()).out
    assert said.startswith("Final loss of 1 arm against a: above it (1).\nb ends above a: +0.5000 [")
