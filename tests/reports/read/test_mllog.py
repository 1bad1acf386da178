"""MLPerf logs: what is read, what is named, and the real ones against a separate computation."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from logs import mllog
from scipy import stats
from synthetic_study import analysed

from ablate.base.errors import UserError
from ablate.reports.read.imported import write_study
from ablate.reports.read.mllog import read_mllog
from ablate.store.plan_file import Target
from tests.golden import cases, check

HEAD = "seed=7 global_batch_size=16 max_sequence_length=10 run_start "
EVALS = " ".join(f"eval_accuracy={5 - n}@samples_count={n}00" for n in range(3))
STOP = " run_stop=@status=success"


def read(tmp_path, words, **options):
    path = tmp_path / "result_0.txt"
    faults = []
    path.write_text("some text before\n" + "\n".join(mllog(words)) + "\n")
    return read_mllog(path, faults, **options), [
        fault.removeprefix(str(path)) for fault in faults
    ]


@pytest.mark.parametrize("case", cases(Path(__file__).with_name("mllog.txt")))
def test_what_is_read_and_what_is_named(tmp_path, case):
    try:
        run, lines = read(tmp_path, case[2])
    except UserError as refused:
        run = None
        lines = [str(refused).removeprefix(str(tmp_path / "result_0.txt"))]
    if run:
        evals = " ".join(f"{tokens}:{loss:g}" for tokens, loss in run.evals)
        lines.insert(0, f"{run.state} {run.seed} {evals}")
    check(case, lines)


def test_settings_times_and_the_tokens_of_a_sample(tmp_path):
    # the first is empty, as in templates
    parts = ("in_linear=", "linear=mxfp4", "in_attn=bfloat16")
    older = " ".join(f"lowest_numerical_precision_{part}" for part in parts)
    run, _ = read(tmp_path, f"{HEAD} {older} {EVALS} {STOP}", tokens_per_sample=20)
    assert run.evals[-1] == (4000, 3.0)
    assert run.started_unix == run.ended_unix == 1.7e9
    assert run.settings == {
        "global_batch_size": 16, "max_sequence_length": 10, "lowest_numerical_precision_in_linear": "mxfp4",
        "lowest_numerical_precision_in_attn": "bfloat16",
    }  # fmt: skip
    run, _ = read(
        tmp_path,
        f"submission_platform=8xSUBMISSION_PLATFORM_PLACEHOLDER {HEAD} {EVALS}",
    )
    assert "submission_platform" not in run.settings, "a template that nobody filled in"


def test_ranks_prefixes_and_what_is_no_record(tmp_path):
    path = tmp_path / "result_0.txt"
    faults = []
    lines = [f"{rank}: {line}" for line in mllog(HEAD + EVALS) for rank in range(8)]
    lines += ['+ echo \':::SYSJSON {"not": "a record"}\'', ':::MLLOG ["run_stop"]']
    lines += [lines[55][:-20], mllog(STOP)[0][:-10]]
    path.write_text("\n".join(lines))
    assert len(read_mllog(path, faults).evals) == 3
    places = [fault.removeprefix(f"{path}:").partition(":")[0] for fault in faults]
    assert places[:3] == ["58", "59", "60"]
    assert faults[2].endswith("cut off in the middle")


SYSTEM = {
    "number_of_nodes": "2",
    "accelerators_per_node": "4",
    "accelerator_model_name": "NVIDIA  GB300",
}


@pytest.mark.parametrize(
    "system",
    [
        SYSTEM,
        [],
        {},
        SYSTEM | {"number_of_nodes": ""},
        SYSTEM | {"number_of_nodes": "0"},
    ],
)
def test_the_description_of_the_system_tells_the_hardware(tmp_path, system):
    folder = tmp_path / "Org" / "results" / "sys" / "llama31_8b"
    described = tmp_path / "Org" / "systems" / "sys.json"
    folder.mkdir(parents=True)
    described.parent.mkdir()
    described.write_text(json.dumps(system))
    # The platform is what public logs of a GB300 say.
    run, faults = read(folder, f"{HEAD} submission_platform=2xGB200 {EVALS} {STOP}")
    if system == SYSTEM:
        assert faults == []
        assert run.settings["hardware"] == "8x NVIDIA GB300"
        assert "submission_platform" not in run.settings
        assert run.environment["platform"] == "2xGB200"
    else:
        assert "hardware" not in run.settings
        (fault,) = faults
        assert "sys.json: it does not tell the accelerators and their number: " in fault


def by_hand(folder):
    """Samples to 3.3 of every log, in a few lines that share nothing with the importer."""
    crossings = []
    for path in sorted(folder.glob("result_*.txt")):
        points = {}
        for match in re.finditer(
            r':::MLLOG (\{.*"eval_accuracy".*\})', path.read_text(errors="replace")
        ):
            content = json.loads(match[1])
            points[content["metadata"]["samples_count"]] = content["value"]
        samples, loss = np.array(sorted(points.items())).T
        i = int(np.argmax(loss <= 3.3))
        share = (loss[i - 1] - 3.3) / (loss[i - 1] - loss[i])
        crossings.append(
            (1 - share) * np.log(samples[i - 1]) + share * np.log(samples[i])
        )
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
        arms[name] = [
            read_mllog(path, faults := [])
            for path in sorted(folder.glob("result_*.txt"))
        ]
        assert faults == []
    target = Target(kind="val_loss", value=3.3)
    store, faults = write_study(
        tmp_path / "s",
        arms,
        baseline="FP8",
        target=target,
        waived=("submission_platform",),
    )
    assert faults == []
    return store, folders


def test_nvfp4_against_fp8_on_the_real_logs(nvfp4_against_fp8):
    store, folders = nvfp4_against_fp8
    analysis = analysed(store)
    cost = next(arm for arm in analysis.others if arm.name == "NVFP4").token_cost
    x = by_hand(folders["NVFP4"])
    y = by_hand(folders["FP8"])
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
    assert all(
        run.tokens_per_sec and run.tokens_per_sec > 1e5
        for arm in analysis.arms
        for run in arm.runs
    )
