"""MLPerf logs: what is read, what is named, and the real ones against a separate computation."""

import json
import math
import re
from pathlib import Path

import cadence
import numpy as np
import pytest
from scipy import stats

from ablate.reports.findings.analyse import analyse
from ablate.reports.read.imported import ImportedStudy, write_study
from ablate.reports.read.mllog import read_mllog
from ablate.results.frames import load_frames
from ablate.store.plan_file import Target


def record(key, value=None, **meta):
    content = {"namespace": "", "time_ms": 1.7e12, "event_type": "POINT_IN_TIME", "key": key, "value": value}
    return f":::MLLOG {json.dumps(content | {'metadata': meta})}"


HEAD = [
    "some text before",
    record("seed", 7),
    record("global_batch_size", 16),
    record("max_sequence_length", 8192),
    record("run_start"),
]
EVALS = [record("eval_accuracy", loss, samples_count=n) for n, loss in ((100, 5.0), (200, 4.0), (300, 3.2))]
STOP = record("run_stop", status="success", samples_count=300)


@pytest.fixture
def log(tmp_path):
    def write(*lines, name="result_0.txt"):
        path = tmp_path / name
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


def test_a_plain_log(log):
    run, faults = read_mllog(log(*HEAD, *EVALS, STOP))
    assert faults == []
    assert run.seed == 7
    assert run.evals == ((819_200, 5.0), (1_638_400, 4.0), (2_457_600, 3.2))
    assert (run.state, run.message) == ("finished", None)
    assert run.settings == {"global_batch_size": 16, "max_sequence_length": 8192}
    assert run.started_unix == run.ended_unix == 1.7e9


def test_ranks_prefixes_and_text_between(log):
    lines = [f"{rank}: {line}" for line in (*HEAD, *EVALS, STOP) for rank in range(8)]
    lines.insert(9, '+ echo \':::SYSJSON {"not": "a record"}\'')
    run, faults = read_mllog(log(*lines))
    assert faults == []
    assert len(run.evals) == 3


def test_epoch_num_counts_samples_too(log):
    lines = [line.replace("samples_count", "epoch_num") for line in EVALS]
    run, _ = read_mllog(log(*HEAD, *lines, STOP))
    assert [tokens // 8192 for tokens, _ in run.evals] == [100, 200, 300]


def test_tokens_of_a_sample(log):
    without = [line for line in HEAD if "max_sequence_length" not in line]
    path = log(*without, *EVALS, STOP)
    assert read_mllog(path)[0] is None
    assert "give --tokens-per-sample" in read_mllog(path)[1][0]
    assert read_mllog(path, tokens_per_sample=10)[0].evals[0] == (1000, 5.0)


NAN = record("eval_accuracy", math.nan, samples_count=9)
ABORTED = record("run_stop", status="aborted")
WRONG = {
    "no end": ([*HEAD, *EVALS], "interrupted", r"\.txt: the log ends without run_stop: no result"),
    "given up": ([*HEAD, *EVALS, ABORTED], "finished", None),
    "diverged": ([*HEAD, NAN, ABORTED], "diverged", None),
    "cut": ([*HEAD, EVALS[0], EVALS[1][:-20], STOP], "finished", r"\.txt:7: not JSON: "),
    "two losses": (
        [*HEAD, *EVALS, EVALS[0].replace("5.0", "6.0"), STOP], "finished", r"\.txt:9: another loss \(6.0\)",
    ),
    "a word for a loss": (
        [*HEAD, *EVALS, record("eval_accuracy", "good", samples_count=5), STOP], "finished",
        r"\.txt:9: an evaluation needs a number",
    ),
    "no count": (
        [*HEAD, *EVALS, record("eval_accuracy", 3.0), STOP], "finished", r"\.txt:9: an evaluation needs",
    ),
    "a list": ([*HEAD, *EVALS, ':::MLLOG ["run_stop"]', STOP], "finished", r"\.txt:9: not a JSON object"),
}  # fmt: skip


def test_a_seed_that_is_not_told_is_not_made_up(log):
    assert read_mllog(log(HEAD[0], *HEAD[2:], *EVALS, STOP))[0].seed is None


def test_precision_is_a_setting_by_its_older_name_too(log):
    older = record("lowest_numerical_precision_linear", "mxfp4")
    newer = [record(f"lowest_numerical_precision_in_{part}", "bfloat16") for part in ("attn", "comm")]
    empty = record("lowest_numerical_precision_in_linear", "")  # the default of public templates
    run, faults = read_mllog(log(*HEAD, empty, older, *newer, *EVALS, STOP))
    assert faults == []
    assert {key[30:]: value for key, value in run.settings.items() if key.startswith("lowest")} == {
        "linear": "mxfp4", "attn": "bfloat16", "comm": "bfloat16",
    }  # fmt: skip


def test_a_template_nobody_filled_in_is_no_platform(log):
    lines = [record("submission_platform", "8xSUBMISSION_PLATFORM_PLACEHOLDER")]
    lines += [record("submission_org", "SUBMISSION_ORG_PLACEHOLDER")]
    run, _ = read_mllog(log(*HEAD, *lines, *EVALS, STOP))
    assert "submission_platform" not in run.settings
    assert run.settings["number_of_nodes"] == 8
    assert run.environment["platform"] == "not named (the template's text was left in its place)"
    assert run.environment["organisation"] is None
    run, _ = read_mllog(log(*HEAD, lines[0].replace("8xSUB", "SUB"), *EVALS, STOP))
    assert not {"submission_platform", "number_of_nodes"} & run.settings.keys()


SYSTEM = {"number_of_nodes": "2", "accelerators_per_node": "4", "accelerator_model_name": "NVIDIA  GB300"}


def submission(folder, system=SYSTEM, lines=(*HEAD, *EVALS, STOP)):
    """Write a submission: the log of one run, and what it says of its system."""
    path = folder / "Org" / "results" / "sys" / "llama31_8b" / "result_0.txt"
    described = folder / "Org" / "systems" / "sys.json"
    for file, text in ((path, "\n".join(lines)), (described, json.dumps(system))):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return path


def test_the_description_of_the_system_tells_the_hardware(tmp_path):
    platform = record("submission_platform", "2xNVIDIA GB200")  # as public logs of a GB300 say
    path = submission(tmp_path, lines=(*HEAD, platform, *EVALS, STOP))
    run, faults = read_mllog(path)
    assert faults == []
    assert run.settings["hardware"] == "8x NVIDIA GB300"
    assert "submission_platform" not in run.settings
    assert run.environment["platform"] == "2xNVIDIA GB200"


@pytest.mark.parametrize(
    "system", [[], {}, SYSTEM | {"number_of_nodes": ""}, SYSTEM | {"number_of_nodes": "0"}]
)
def test_a_description_that_does_not_tell_is_named(tmp_path, system):
    run, faults = read_mllog(submission(tmp_path, system))
    assert "hardware" not in run.settings
    assert len(faults) == 1
    assert "sys.json: it does not tell the accelerators and their number: " in faults[0]


@pytest.mark.parametrize(("lines", "state", "fault"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named_and_the_rest_goes_on(log, lines, state, fault):
    run, faults = read_mllog(log(*lines))
    assert run.state == state
    if fault is None:
        assert faults == []
    else:
        assert re.search(fault, faults[0]), faults


def test_a_log_that_is_cut_in_a_record_is_named(tmp_path):
    path = tmp_path / "result_0.txt"
    path.write_text("\n".join([*HEAD, *EVALS]) + "\n" + STOP[:-10])
    run, faults = read_mllog(path)
    assert run.state == "interrupted"
    assert faults[0] == f"{path}:9: cut off in the middle"


def test_files_that_are_no_logs(tmp_path, log):
    assert "cannot be read" in read_mllog(tmp_path / "absent.txt")[1][0]
    assert read_mllog(log("nothing here"))[0] is None
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 100)
    assert "no evaluation" in read_mllog(tmp_path / "binary")[1][0]


def by_hand(folder):
    """Samples to 3.3 of every log, in a few lines that share nothing with the importer."""
    crossings = []
    for path in sorted(folder.glob("result_*.txt")):
        points = {}
        for match in re.finditer(r':::MLLOG (\{.*"eval_accuracy".*\})', path.read_text(errors="replace")):
            content = json.loads(match[1])
            points[content["metadata"]["samples_count"]] = content["value"]
        at = np.array(sorted(points), dtype=float)
        loss = np.array([points[n] for n in sorted(points)])
        i = int(np.argmax(loss <= 3.3))
        share = (loss[i - 1] - 3.3) / (loss[i - 1] - loss[i])
        crossings.append((1 - share) * np.log(at[i - 1]) + share * np.log(at[i]))
    return np.array(crossings)


@pytest.fixture
def nvfp4_against_fp8(tmp_path, shared_data):
    logs = shared_data / "mlperf_v5.1"
    folders = {
        "NVFP4": logs / "NVIDIA" / "theia_ngpu8_ngc25.09_nemo",
        "FP8": logs / "Dell" / "1xXE9780x8B300-SXM-270GB",
    }
    arms = {}
    for name, folder in folders.items():
        read = [read_mllog(path) for path in sorted(folder.glob("result_*.txt"))]
        assert [faults for _, faults in read if faults] == []
        arms[name] = [run for run, _ in read]
    study = ImportedStudy(
        name="s", arms=arms, baseline="FP8", target=Target(kind="val_loss", value=3.3),
        waived=("submission_platform",),
    )  # fmt: skip
    store, faults = write_study(study, tmp_path / "s")
    assert faults == []
    return store, folders


def test_the_documents_say_what_the_cadence_does(nvfp4_against_fp8, monkeypatch, capsys):
    store, _ = nvfp4_against_fp8
    monkeypatch.setattr("sys.argv", ["cadence.py", str(store.path), "3.6"])
    cadence.main()
    page = " ".join((Path(__file__).parents[3] / "docs" / "logs.md").read_text(encoding="utf-8").split())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    costs = {
        rule: [
            float(cost) for line in lines if rule in line for cost in re.findall(r"([+-]?\d+\.\d)\s%", line)
        ]
        for rule in ("confirmed", "first_eval")
    }
    assert f"anything from {min(costs['first_eval']):.0f} to {max(costs['first_eval']):.0f} %" in page
    assert f"they say {min(costs['confirmed'])} to {max(costs['confirmed'])} %" in page
    assert f"around the {costs['confirmed'][0]} % of the full reading" in page


def test_nvfp4_against_fp8_on_the_real_logs(nvfp4_against_fp8):
    store, folders = nvfp4_against_fp8
    analysis = analyse(load_frames(store))
    cost = next(arm for arm in analysis.others if arm.name == "NVFP4").token_cost
    x, y = by_hand(folders["NVFP4"]), by_hand(folders["FP8"])
    # Each side's variance as if the mean of both were known from two more degrees of freedom.
    mean = (x.var(ddof=1) + y.var(ddof=1)) / 2
    parts = np.array([(2 * mean + 9 * side.var(ddof=1)) / 11 / 10 for side in (x, y)])
    degrees = min(18, parts.sum() ** 2 / (parts**2 / 11).sum())
    half = stats.t.ppf(0.975, degrees) * math.sqrt(parts.sum())
    middle = x.mean() - y.mean()
    assert [cost.estimate, cost.low, cost.high] == pytest.approx(
        list(np.expm1([middle, middle - half, middle + half])), rel=1e-6
    )
    # Published from 110 and 30 runs of the same systems: +9.0 % ± 0.6.
    assert cost.low < 0.09 < cost.high
    assert analysis.resolution.share_of_tokens_to_target == pytest.approx(12_288 / np.exp(y.mean()), rel=1e-6)
    assert all(run.tokens_per_sec and run.tokens_per_sec > 1e5 for arm in analysis.arms for run in arm.runs)
