"""``ablate import``: from logs to a report, and what is wrong in one line."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ablate.base.errors import UserError
from ablate.cli import cli, main

ROWS = "tokens,val_loss,seed\n" + "".join(
    f"{n * 1000},{5 - n * pace},{seed}\n" for seed, pace in enumerate((0.5, 0.52, 0.49)) for n in range(1, 6)
)


@pytest.fixture
def logs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("fp8.csv").write_text(ROWS)
    Path("fp4.csv").write_text(ROWS.replace("1000,", "1100,").replace("2000,", "2200,"))
    return tmp_path


COMMON = ["--study", "s", "--baseline", "fp8", "--target", "val_loss=3.5"]
CSV = ["import", "csv", "--arm", "fp8=fp8.csv", "--arm", "fp4=fp4.csv", *COMMON]


def call(*arguments):
    return CliRunner().invoke(cli, arguments, catch_exceptions=False)


def test_csv_to_report(logs):
    result = call(*CSV)
    assert result.exit_code == 0, result.output
    assert "fp8: 3 runs, 15 evaluations" in result.output
    report = call("report", "s", "--json")
    content = json.loads(report.output)
    assert [arm["n"] for arm in content["arms"]] == [3, 3]
    assert content["timing"] == "logged"
    assert call("status", "s").exit_code == 0


def test_names_that_steer_a_terminal_or_a_page_are_visible_text_in_every_file(logs):
    red, reversed_ = "fp8\x1b[31m", "\u202efp4"
    named = [f"--arm={red}=fp8.csv", f"--arm={reversed_}=fp4.csv", f"--baseline={red}"]
    result = call("import", "csv", *named, "--study", "s", "--target", "val_loss=3.5")
    assert result.exit_code == 0, result.output
    assert "fp8\\x1b[31m: 3 runs, 15 evaluations\n\\u202efp4: 3 runs" in result.output
    assert call("report", "s").exit_code == 0
    written = [
        path for path in Path("ablate-runs/s").rglob("*") if path.suffix in (".md", ".csv", ".json", ".html")
    ]
    assert {path.suffix for path in written} == {".md", ".csv", ".json", ".html"}
    for path in written:
        assert not {"\x1b", "\u202e"} & set(path.read_text()), path


def test_the_evaluations_of_a_report_are_a_study_again(logs):
    call(*CSV, "--paired")
    call("report", "s")
    [table] = Path("ablate-runs/s/report").rglob("evaluations.csv")
    table.rename("theirs.csv")
    again = ["--study", "again", "--baseline", "fp8", "--target", "val_loss=3.5", "--paired"]
    result = call("import", "csv", "theirs.csv", *again)
    assert result.exit_code == 0, result.output
    first, second = (json.loads(call("report", name, "--json").output) for name in ("s", "again"))
    for was, now in zip(first["arms"], second["arms"], strict=True):
        assert now["name"] == was["name"]
        assert now["token_cost"] == was["token_cost"]
        assert now["final_loss"] == was["final_loss"]


def test_an_arm_may_lie_in_several_files(logs):
    head, *rows = ROWS.splitlines(keepends=True)
    for seed in "012":
        both = [
            row[:-1] + f",{arm}\n" for arm in ("fp8", "fp4") for row in rows if row.endswith(f",{seed}\n")
        ]
        Path(f"seed{seed}.csv").write_text("".join([head[:-1] + ",arm\n", *both]))
    result = call("import", "csv", "seed0.csv", "seed1.csv", "seed2.csv", *COMMON)
    assert result.exit_code == 0, result.output
    assert "fp8: 3 runs, 15 evaluations\nfp4: 3 runs, 15 evaluations" in result.output


def test_faults_are_named_the_rest_goes_on_and_the_exit_code_says_so(logs):
    with Path("fp8.csv").open("a") as file:
        file.write("6000,broken,0\n")
    result = call(*CSV)
    assert result.exit_code == 1
    assert "fp8.csv:17: expected a number in 'val_loss', got 'broken'" in result.output
    assert call("report", "s").exit_code == 0


def test_jsonl_and_wandb(logs):
    Path("a.jsonl").write_text(
        "".join(json.dumps({"tokens": n, "val_loss": 5 - n}) + "\n" for n in (1, 2, 3))
    )
    assert call("import", "jsonl", "--arm", "fp8=a.jsonl", *COMMON).exit_code == 0
    Path("chart.csv").write_text('"Step","fp8-0 - l","fp4-0 - l"\n1,4,5\n2,3,4\n3,2,3\n')
    arms = ["--arm", "fp8=fp8-*", "--arm", "fp4=fp4-*"]
    result = call("import", "wandb-export", "chart.csv", *arms, "--tokens-per-step", "1000", *COMMON)
    assert result.exit_code == 0, result.output
    assert "fp4: 1 runs, 3 evaluations" in result.output


def test_folders_are_searched_and_several_make_an_arm(logs):
    head, *rows = ROWS.splitlines(keepends=True)
    for seed, place in zip("012", ("b/deep/er", "b", "a"), strict=True):
        Path(place).mkdir(parents=True, exist_ok=True)
        own = [row for row in rows if row.endswith(f",{seed}\n")]
        Path(place, "log.csv").write_text("".join([head, *own]))
    Path("b/.hidden.csv").write_text("nothing")
    Path("b/notes.md").write_text("nothing")
    arms = ["--arm", "fp8=b", "--arm", "fp8=a", "--arm", "fp4=fp4.csv"]
    result = call("import", "csv", *arms, *COMMON)
    assert result.exit_code == 0, result.output
    assert (
        "b: 2 files like *.csv, 1 others not read\na: 1 files like *.csv, 0 others not read\n"
        in result.output
    )
    plan = json.loads(Path("ablate-runs/s/plan.lock.json").read_text())
    assert [run["seed"] for run in plan["arms"][0]["runs"]] == [0, 1, 2]  # b/deep/er before b/log.csv
    with pytest.raises(UserError, match=r"b/deep/er/log.csv: no column 'arm'"):
        call("import", "csv", "b", "a", *COMMON)


LINES = "a line\nseed 5\n" + "".join(
    f"step:{n}/400 val_loss:{loss} train_time:{n}ms\n" for n, loss in ((0, 9.0), (200, 4.0), (400, 3.0))
)
PATTERNS = [
    "--pattern", r"step:(?P<step>\d+)/\d+ val_loss:(?P<val_loss>\S+) train_time:(?P<ms>\d+)ms",
    "--pattern", r"seed (?P<seed>\d+)",
]  # fmt: skip
TEXT = ["import", "text", "--arm", "fp8=old", "--arm", "fp4=new", *PATTERNS, *COMMON]


@pytest.fixture
def texts(logs):
    for number, place in enumerate(("old", "old", "new", "new")):
        Path(place).mkdir(exist_ok=True)
        Path(place, f"{number}.txt").write_text(LINES.replace("seed 5", f"seed {number}"))
    return logs


def test_plain_text_to_report(texts):
    sizes = ["--tokens-per-step", "10", "--tokens-per-step", "fp4=0:10,200:20"]
    result = call(*TEXT, *sizes, "--hardware", "2x NVIDIA H100")
    assert result.exit_code == 0, result.output
    content = json.loads(call("report", "s", "--json").output)
    fp8, fp4 = content["arms"]
    assert [(run["seed"], run["tokens"]) for run in fp8["runs"]] == [(0, 4000), (1, 4000)]
    assert [run["tokens"] for run in fp4["runs"]] == [6000, 6000]
    assert fp4["token_cost"]["estimate"] == pytest.approx(1.5**0.5 - 1)  # half-way in ln tokens
    assert fp4["measured"]["timed"] == "as logged"
    # As many steps in as much time: what they cost more in tokens, they have more throughput.
    assert fp4["measured"]["throughput_over_baseline"]["estimate"] == pytest.approx(1.5)
    assert fp4["measured"]["end_to_end_speed"]["estimate"] == pytest.approx(1.5**0.5)


def test_pairs_by_the_place_in_a_file_are_refused(logs):
    for arm in ("fp8", "fp4"):
        Path(f"{arm}.csv").write_text(Path(f"{arm}.csv").read_text().replace("seed", "run"))
    assert call(*CSV).exit_code == 0
    with pytest.raises(
        UserError, match=r"--paired: fp8.csv \(0\) \(arm 'fp8'\) tells no seed, so it has no pair"
    ):
        call(*CSV, "--paired")


def test_final_losses_to_report(logs):
    rows = [
        f"{arm},{seed},{3 + seed / 100 + shift}" for arm, shift in (("a", 0), ("b", 0.5)) for seed in (0, 1)
    ]
    Path("final.csv").write_text("\n".join(["arm,seed,val_loss", *rows]))
    result = call("import", "csv", "final.csv", "--study", "s", "--baseline", "a")
    assert result.exit_code == 0, result.output
    report = call("report", "s")
    assert report.output.startswith("Final loss of 1 arm against a: above it (1).\nb ends above a: +0.5000 [")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["import", "csv", "--arm", "fp8", *COMMON],
            "--arm: expected NAME=VALUE, got 'fp8' (such as FP8=logs/fp8)",
        ),
        (["import", "csv", *COMMON], "expected FILES with a column of arms, or --arm NAME=FILE for each arm"),
        (
            ["import", "csv", "fp8.csv", "--arm", "fp4=fp4.csv", *COMMON],
            "expected FILES with a column of arms, or --arm NAME=FILE for each arm",
        ),
        (
            ["import", "csv", "fp8.csv", *COMMON],
            "fp8.csv: no column 'arm' (see --columns, or use --arm NAME=FILE)",
        ),
        (["import", "csv", "absent.csv", *COMMON], "Path 'absent.csv' does not exist"),
        ([*CSV, "--columns", "run=a,run=b"], "--columns: 'run' is given twice"),
        (["import", "csv", "--arm", "fp8=absent", *COMMON], "--arm fp8: absent does not exist"),
        (
            ["import", "mllog", "--arm", "fp8=.", *COMMON],
            "--arm fp8: nothing like result*.txt or *.log or *.out in .",
        ),
        ([*CSV[:-1], "3.5"], "--target: expected val_loss=NUMBER or perplexity=NUMBER, got '3.5'"),
        ([*CSV[:-1], "perplexity=-1"], "--target: a perplexity is above 1, got -1"),
        ([*CSV[:-1], "perplexity=0.9"], "--target: a perplexity is above 1, got 0.9"),
        ([*CSV[:-1], "val_loss=inf"], "--target: expected val_loss=NUMBER"),
        (
            [*CSV, "--baseline", "fp4"],
            "--baseline: fp8 and fp4 (expected one arm: make a study for each)",
        ),
        (["bf16" if part == "fp8" else part for part in CSV], "--baseline: no arm 'bf16' (arms: fp8, fp4)"),
        ([*CSV, "--study", "../s"], "--study: '../s' is no folder name"),
        (
            [*CSV, "--columns", "loss=x"],
            "--columns: no column of ours is 'loss' (expected tokens, val_loss, run",
        ),
        ([*CSV, "--columns", "tokens=step"], "--columns: fp8.csv has no column 'step' (has "),
        ([*CSV, "--tokens-per-step", "0"], "--tokens-per-step: expected a number, or stages from step 0 on"),
        ([*CSV, "--tokens-per-step", "5:10"], "--tokens-per-step: expected a number, or stages from step 0"),
        ([*CSV, "--tokens-per-step", "0:10,5:x"], "--tokens-per-step: expected a number, or stages from"),
        ([*CSV, "--tokens-per-step", "0:1,5:2,5:3"], "--tokens-per-step: expected a number, or stages from"),
        ([*CSV, "--tokens-per-step", "fp5=9"], "--tokens-per-step: no --arm fp5=… is given"),
        (
            [*CSV, "--tokens-per-step", "fp8=9", "--tokens-per-step", "fp8=8"],
            "--tokens-per-step: 'fp8=8' is a second one for fp8",
        ),
        (
            [*CSV, "--hardware", "H100"],
            "--hardware: expected NUMBERx NAME, such as '8x NVIDIA H100', got 'H100'",
        ),
        ([*CSV, "--columns", "seed=s"], "--columns: fp8.csv has no column 's' (has "),
        ([*TEXT[:-2], "--tokens-per-step", "1"], "--arm fp8: old does not exist"),
        (["import", "text", "--arm", "fp8=fp8.csv", "--pattern", "(", *COMMON], "is no regular expression: "),
        (["import", "mlperf"], "'mlperf' is not one of 'mllog', 'text', 'csv'"),
        ([*CSV, "--experiment", "x"], "--experiment: not for csv"),
        ([*CSV[:-2], "--crossing", "first_eval"], "--crossing: there is no --target to cross"),
        (
            [
                *["import", "wandb-export", "fp8.csv", "--arm", "fp8=*", "--tokens-per-step", "fp8=3"],
                *COMMON,
            ],
            "--tokens-per-step: a chart has one axis of steps for all arms (leave ARM= out)",
        ),
        (
            ["import", "text", "--arm", "fp8=fp8.csv", *PATTERNS, *COMMON],
            "--tokens-per-step: needed, because the pattern gives steps",
        ),
        (
            ["import", "text", "--arm", "fp8=fp8.csv", *PATTERNS, *COMMON, "--tokens-per-step", "5"],
            "arm 'fp8' has no run that could be read",
        ),
    ],
)
def test_bad_input_is_one_line(logs, capsys, monkeypatch, arguments, line):
    monkeypatch.setattr("sys.argv", ["ablate", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert line in capsys.readouterr().err
    assert not Path("ablate-runs/s/plan.lock.json").exists()
