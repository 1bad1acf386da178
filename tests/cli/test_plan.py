from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from ablate.cli import VERBS, cli
from ablate.cli.common import format_table
from ablate.store import Status, StudyStore
from ablate.study.schema import json_schema
from tests.cli.command import ablate

STUDY = """\
name: mine
description: "[bold]not markup[/bold] :smile:"
baseline: bf16
target: {perplexity: 27.1, crossing: first_eval}
seeds: [3, 4]
paired_seeds: true
base:
  model: {width: 64, heads: 2, ffn: 96, layers: 2}
  training: {tokens: 10_000, eval_every_tokens: 5_000}
arms:
  bf16:
  all: {recipe: mxfp4}
  long: {recipe: fp8, model: {layers: 1}, training: {tokens: 20_000, micro_batch_size: 8, schedule: cosine}}
grid:
  factors:
    recipe.gemms: {no FP4: [], F: [fprop]}
    recipe.stabiliser: {plain: none, SR: sr}
  senseless: drop
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "study.yaml").write_text(STUDY)
    return tmp_path


def plan(*arguments):
    result = CliRunner().invoke(cli, ["plan", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def changed(here, *changes):
    """Write the study with these changes, one (before, after) each."""
    text = STUDY
    for before, after in changes:
        assert before in text
        text = text.replace(before, after, 1)
    (here / "study.yaml").write_text(text)
    return text


def as_json(*arguments):
    return json.loads(plan("study.yaml", "--json", *arguments))


OWN = "def train(config, on_metrics, **more): ...\n"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            [("grid:", "  late: {fork: {from: bf16, at: 7_000}, recipe: fp8}\ngrid:")],
            [
                "fork      late from bf16 after 8,192 tokens; token costs count from there\n",
                "2 begin with steps that another trains, to the same bits: 8,192 tokens less\n",
            ],
        ),
        (
            [("seeds: [3, 4]", "seeds: {until: settled, at_most: 5}\nstop: {diverged: 2}")],
            [
                "seeds     an arm stops after diverged runs: 2\n",
                "settled: looks after each of 2 to 5, at 2.1, 1.5, 1.4 and 1.4\u00a0%\n",
            ],
        ),
        (  # A model that a trainer builds is not stated; no rule is held against layers of the default one.
            [
                ("\n  model: {width: 64, heads: 2, ffn: 96, layers: 2}", ""),
                (" model: {layers: 1},", ""),
                ("base:\n", "base:\n  trainer: mine.py:train\n"),
                ("mxfp4}", "{gemms: [fprop], layers: [{match: h.0.attn, recipe: bf16}]}}"),
            ],
            [
                "/mine.py:train builds it, and the study has no model\n",
                "layers    not known\n",
                "time      not known before a run is finished: the study does not describe the model\n",
            ],
        ),
    ],
    ids=["fork", "stop rule", "trainer"],
)
def test_what_else_a_study_may_have_has_a_line(here, changes, said):
    (here / "mine.py").write_text(OWN)
    changed(here, *changes)
    text = plan("study.yaml")
    assert not [line for line in said if line not in text]


def test_what_is_trained_once_is_counted_once(here):
    changed(here, ("grid:", "  late: {fork: {from: bf16, at: 7_000}, recipe: fp8}\ngrid:"))
    content = as_json("--hardware", "B200")
    place, late = next((i, arm) for i, arm in enumerate(content["arms"]) if "fork" in arm)
    assert (late["name"], late["fork"]) == ("late", {"arm": "bf16", "tokens": 8192})
    assert late["differs"]["fork"] == [None, "from bf16 after 8,192 tokens"]
    assert content["estimate"]["shared_tokens"] == 8192
    hours = [arm["on_hardware"]["B200"]["gpu_hours_per_run"] for arm in content["arms"]]
    saved = 2 * 4096 / 12_288 * hours[place]  # of each of two runs one step of three
    assert content["on_hardware"]["B200"]["gpu_hours"] == pytest.approx(2 * sum(hours) - saved)


def test_the_plan_for_people(here):
    text = re.sub(r"time      about \d+ s on \d+ CPU cores", "time      …", plan("study.yaml"))
    assert (
        text
        == """\
mine: [bold]not markup[/bold] :smile:
baseline bf16; target perplexity 27.1 (first evaluation)
seeds 3, 4, paired

arm      recipe                            differs from the baseline in                    runs
bf16     bf16                              (baseline)                                      2 pending
all      mxfp4                             gemms fprop+dgrad+wgrad                         2 pending
long     fp8                               layers 1; tokens 20,000; micro_batch_size 8;    2 pending
                                           schedule cosine; rest fp8
F plain  Fprop mxfp4; Dgrad+Wgrad bf16     gemms fprop                                     2 pending
F SR     Fprop mxfp4 SR; Dgrad+Wgrad bf16  gemms fprop; stabiliser sr                      2 pending

batch     32 sequences × 128 tokens = 4,096 a step (bf16, all, F plain and 1 more)
          32 sequences × 128 tokens = 4,096 a step, in 4 micro-batches of 8 (long)
budget    12,288 tokens a run in 3 steps, 3 evaluations (bf16, all, F plain and 1 more)
          20,480 tokens a run in 5 steps, 5 evaluations (long)
work      7.55e+09 FLOPs a run (bf16, all, F plain and 1 more)
          7.3e+09 FLOPs a run (long)
schedule  constant at 0.004 (bf16, all, F plain and 1 more)
          cosine from 0.004 to 0.0004 at the end of the budget (long)
model     llama, width 64, layers 2, heads 2, ffn 96: 0.0863 M parameters (bf16, all, F plain and 1 more)
          llama, width 64, layers 1, heads 2, ffn 96: 0.0514 M parameters (long)
layers    0 of 9 linear layers in low precision (bf16)
          8 of 9 linear layers in low precision (all, F plain, F SR)
          4 of 5 linear layers in low precision (long)
seeds     2 find a cost of 13%, 3 find a cost of 7%, 5 find a cost of 5% in 4 of 5 comparisons \
(where pairs of runs spread by 3.5%)
runs      10 (10 pending), 139,264 tokens in all
time      … (measured where runs are finished, else modelled: an order of magnitude, emulation takes longer)
storage   about 0.1 MB, without the token cache

folded cells of the grid: 1
  no FP4 plain: the same configuration as 'bf16'

dropped cells of the grid: 1
  no FP4 SR: stabiliser 'sr' with no FP4 GEMM to act on
"""
    )


def test_the_plan_as_json(here):
    before = sorted(path.name for path in here.rglob("*"))
    content = as_json()
    assert sorted(path.name for path in here.rglob("*")) == before  # planning writes nothing
    reason = "the same configuration as 'bf16'"
    assert content["folded"] == [{"name": "no FP4 plain", "into": "bf16", "reason": reason}]
    assert [cell["name"] for cell in content["dropped"]] == ["no FP4 SR"]
    assert set(content["estimate"]) == {"wall_seconds", "cores", "storage_bytes", "shared_tokens"}
    arm = content["arms"][1]
    assert arm["runs"][0]["state"] == "pending"
    assert arm["config"]["recipe"]["wgrad"]["left"]["format"] == "mxfp4"
    assert arm["config"]["data_digest"]
    assert "seed" not in arm["config"]
    told = arm["batches"]["steps"], arm["seconds_are"], arm["schedule"]
    assert told == (3, "modelled", "constant at 0.004")
    for arm in content["arms"]:  # on the CPU memory is modelled alone
        [(where, here)] = arm["on_hardware"].items()
        assert where == "cpu"
        assert here["memory_bytes"]["total"] > 12 * arm["parameters"]
        assert here["fits"] is here["gpu_hours_per_run"] is None
        assert arm["flops_per_run"] == arm["flops_per_token"] * arm["batches"]["tokens"]


def test_runs_that_are_done_are_shown_so(here):
    arms = as_json()["arms"]
    store = StudyStore(here / "elsewhere" / "mine")
    for state, run in zip(("finished", "diverged"), arms[0]["runs"], strict=True):
        store.run(run["id"]).create({})
        store.run(run["id"]).write_status(Status(state=state))
    store.run(arms[1]["runs"][0]["id"]).create({})
    store.run(arms[1]["runs"][0]["id"]).write_status(Status(state="running"))
    text = plan("study.yaml", "--storage", "elsewhere", "--runs")
    assert "1 finished, 1 diverged\n" in text
    assert "10 (1 finished, 1 diverged, 1 running, 7 pending)" in text
    assert f"{arms[0]['runs'][1]['id']}  bf16     4     diverged\n" in text
    assert "10 (10 pending)" in plan("study.yaml")  # another storage knows nothing of them


def test_every_problem_is_one_line_on_standard_error_and_the_code_is_2(here):
    (here / "bad.yaml").write_text(STUDY.replace("width", "widht").replace("fp8,", "fp9,"))
    result = ablate("plan", "bad.yaml", cwd=here)
    assert result.code == 2
    assert result.out == ""
    assert result.err == (
        "bad.yaml:8:11: base.model.widht: unknown key (did you mean 'width'?)\n"
        "bad.yaml:13:18: arms.long.recipe: unknown recipe 'fp9' (did you mean 'fp8'?)\n"
    )


def test_without_data_there_is_a_plan_without_ids_if_their_vocabulary_is_known(here):
    changed(here, ("base:\n", "base:\n  data: {source: text, paths: [nowhere]}\n"))
    result = ablate("plan", "study.yaml", cwd=here)
    assert f"{here}/nowhere" in result.line
    assert "width 64, layers 2" in result.out
    assert "no ids: a run's id is a hash of its data, too" in result.out
    told = ablate("plan", "study.yaml", "--json", cwd=here)
    content = json.loads(told.out)
    assert content["missing"] == [told.line]
    assert {run["id"] for arm in content["arms"] for run in arm["runs"]} == {None}
    assert content["arms"][0]["parameters"] > 0
    data = "data: {source: text, paths: [nowhere], tokenizer: hf, tokenizer_path: ./neither}"
    changed(here, ("base:\n", f"base:\n  {data}\n"))
    result = ablate("plan", "study.yaml", cwd=here)
    assert "neither: no such tokenizer" in result.line
    assert result.out == ""


def test_hardware_is_shown_where_it_is_asked_for_and_for_studies_that_take_gpus(here):
    text = plan("study.yaml", "--hardware", "H100", "--price", "MI355X=3")
    assert re.search(r"\nH100 +80 +weights .*, total [\d.e-]+ +5 of 5 arms\n", text)
    lines = text[text.index("GPU-hours a run, modelled") :].splitlines()
    assert lines[1].split() == ["arm", "H100", "MI355X"]
    assert lines[3].split()[:3] == ["all", "–", "0.0"]
    assert re.fullmatch(r"USD +– +\d+ \[\d+, \d+\]", lines[8].rstrip())
    assert "GPU-hours" not in plan("study.yaml")
    changed(here, ("base:\n", "base:\n  resources: {gpus: 1}\n"))
    assert re.search(r"\narm +B200 +B300 +MI355X +H100\n", plan("study.yaml"))
    content = as_json("--price", "B200=4")
    assert set(content["on_hardware"]) == {"B200", "B300", "MI355X", "H100"}
    whole = content["on_hardware"]["B200"]
    assert whole["fits"] is True
    assert whole["usd"] == pytest.approx(4 * whole["gpu_hours"])
    assert content["on_hardware"]["H100"]["gpu_hours"] is None  # no unit for MXFP4
    one = content["arms"][1]["on_hardware"]["B200"]
    assert one["gpu_hours_per_run_low"] < one["gpu_hours_per_run"] < one["gpu_hours_per_run_high"]
    parts = one["memory_bytes"]
    assert parts.pop("total") == sum(parts.values())
    assert set(parts) == {"weights", "gradients", "optimizer", "activations", "quantised"}
    assert (one["capacity_bytes"], one["figures_are"]) == (180 * 10**9, "modelled")
    assert one["usd_per_run"] == pytest.approx(4 * one["gpu_hours_per_run"])
    for end in ("", "_low", "_high"):
        key = f"gpu_hours_per_run{end}"
        hours = sum(len(arm["runs"]) * arm["on_hardware"]["B200"][key] for arm in content["arms"])
        assert whole[f"gpu_hours{end}"] == pytest.approx(hours)


def test_models_and_trainers_of_others_have_no_figures_and_are_named_until_the_study_has_been_run(here):
    (here / "mine.py").write_text(OWN)
    changed(here, ("{recipe: mxfp4}", "{recipe: mxfp4, trainer: mine.py:train}"))
    shown = ablate("plan", "study.yaml", "--hardware", "B200", cwd=here, storage="ablate-runs")
    said = "memory and GPU-hours are modelled for built-in models and the built-in trainer alone, not for all"
    assert shown.out.count(said) == 1
    trust = r"Study mine runs code of its own on this machine: \S+/mine.py:train. Trust it first.\n"
    assert re.fullmatch(trust, shown.err)
    content = as_json("--hardware", "B200")
    assert [arm["name"] for arm in content["arms"] if arm["on_hardware"]["B200"] is None] == ["all"]
    assert content["on_hardware"]["B200"]["gpu_hours"] is None
    (here / "ablate-runs" / "mine").mkdir(parents=True)
    assert ablate("plan", "study.yaml", cwd=here, storage="ablate-runs").err == ""


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_every_verb_has_an_example(verb):
    shown = CliRunner().invoke(cli, [verb, "--help"], catch_exceptions=False).output
    assert re.search(rf"Examples?:\s+(.*\n)*?.*ablate {verb}", shown)


@pytest.mark.parametrize(
    ("calls", "heavy"),
    [
        ([[verb, "--help"] for verb in VERBS], {"pydantic", "torch", "numpy", "ray", "rich", "psutil"}),
        ([["recipes"]], {"torch"}),
        (
            [["plan", "quickstart"]],
            {"torch", "numpy", "ray", "mlflow", "pandas", "scipy", "matplotlib", "tokenizers", "rich"},
        ),
    ],
    ids=["help", "recipes", "plan"],
)
def test_what_has_to_start_fast_imports_nothing_heavy(here, calls, heavy):
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom ablate.cli import cli\n"
        f"for call in {calls}:\n"
        "    assert CliRunner().invoke(cli, call, catch_exceptions=False).exit_code == 0\n"
        f"assert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=here, check=True)


def test_a_locale_without_utf8_does_no_harm(tmp_path):
    (tmp_path / "stüdy.yaml").write_text(STUDY.replace("mine", "stüdy"))
    odd = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "ablate", "plan", "stüdy.yaml", "--storage", "rüns"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | odd, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "stüdy" in done.stdout


def test_a_table_that_is_too_wide_wraps_its_widest_column():
    rows = [("a", "one two three four five", "x" * 10), ("b", "", "y")]
    assert format_table(("n", "words", "last"), rows, width=27) == (
        "n  words         last\na  one two       xxxxxxxxxx\n   three four\n   five\nb                y"
    )
    assert format_table(("n", "m"), [("a\nb c", "x")], width=20) == "n    m\na    x\nb c"


def test_what_a_recipe_does_not_reach_is_shown(tmp_path):
    (tmp_path / "mixing.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def build(*, vocab_size, seq_len):\n"
        "    model = nn.Sequential(nn.Embedding(vocab_size, 64), nn.Linear(64, 64))\n"
        "    model.mixing = nn.Parameter(torch.empty(64, 64))\n"
        "    return model\n"
    )
    head, model = STUDY.partition("base:")[0], "{function: mixing.py:build, allow: [mixing]}"
    study = f"{head}base:\n  model: {model}\narms:\n  bf16:\n  low: {{recipe: mxfp4}}\n"
    (tmp_path / "study.yaml").write_text(study)
    shown = ablate("plan", "study.yaml", "--layers", cwd=tmp_path).out
    assert "1 of 1 linear layers in low precision; matrices out of reach: 1 (low)" in shown
    assert "low: Fprop, Dgrad, Wgrad: 1 of 2 matrices in low precision, 50.0% of the FLOPs\n" in shown
    assert "  not mixing: torch.nn.Sequential holds it, which is no torch.nn.Linear\n" in shown
    low = json.loads(ablate("plan", "study.yaml", "--json", cwd=tmp_path).out)["arms"][1]["coverage"]
    assert (low["wgrad"], [*low["uncovered"]]) == ({"matrices": 1, "flops_share": 0.5}, ["mixing"])


def test_a_reader_that_has_seen_enough_is_no_error():
    """As ``ablate plan quickstart --runs | head``."""
    command = [sys.executable, "-m", "ablate", "plan", "quickstart", "--runs"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)


@pytest.mark.parametrize("words", [("run", "study.yaml", "--storage", "a\udcff"), ("init", "a\udcff.yaml")])
def test_a_path_that_cannot_be_named_in_a_file_is_one_line(here, words):
    assert "is not UTF-8 (take another name)" in ablate(*words, cwd=here).line


def test_the_schema_of_study_files_is_printed(here):
    shown = ablate("init", "--schema", cwd=here).out
    assert json.loads(shown) == json_schema()
    Draft202012Validator.check_schema(json_schema())
