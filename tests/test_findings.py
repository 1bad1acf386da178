"""The tables and figures of ``docs/findings`` follow from the evaluations that lie beside them."""

import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ablate.plan.estimate import INTERPOLATED, SPREAD
from ablate.plan.pilot import PAIRED
from ablate.reports.words import format as words
from tests.benchmark import load_benchmark

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "findings"


filler = load_benchmark("findings")
BLOCKS = [
    (page.name, shlex.split(match[2]), match[3])
    for page in sorted(FOLDER.glob("*.md"))
    for match in filler.BLOCK.finditer(page.read_text(encoding="utf-8"))
]
STUDIES = sorted(path.stem for path in (FOLDER / "data").glob("*.csv"))


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    folder = tmp_path_factory.mktemp("storage")
    filler.rebuild(folder)
    return folder


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("what", "on_the_page"),
    [
        pytest.param(what, text, id=f"{page}: {' '.join(what)}")
        for page, what, text in BLOCKS
    ],
)
def test_tables_and_figures_follow_from_the_evaluations(storage, what, on_the_page):
    study, kind, *settings = what
    found, drawn = filler.block(
        storage, study, kind, dict(one.split("=", 1) for one in settings)
    )
    assert found.strip() == on_the_page.strip()
    assert {
        path.name for path, body in drawn.items() if path.read_bytes() != body
    } == set()


@pytest.mark.exhaustive
def test_the_spreads_that_plans_take_are_those_of_the_arms_that_cost_a_tenth(storage):
    found = set()  # studies share runs
    for analysis in (filler.read(storage, study, None) for study in STUDIES):
        for arm in analysis.others if analysis.plan.target else ():
            if (
                (power := arm.power) is not None
                and power.spread_of_the_pairs
                and arm.token_cost.estimate >= 0.1
            ):
                found.add(
                    (
                        arm.token_cost.pairs - 1,
                        power.spread_of_the_pairs,
                        power.spread_of_log_tokens,
                    )
                )
    degrees = sum(one for one, *_ in found)
    pairs, runs = (
        math.sqrt(sum(one[0] * one[at] ** 2 for one in found) / degrees)
        for at in (1, 2)
    )
    assert (round(pairs, 3), round(pairs / runs, 2)) == (SPREAD, PAIRED)


@pytest.mark.exhaustive
def test_interpolated_crossings_spread_by_as_much_more_as_plans_take(storage):
    gaps = {}
    for analysis in (filler.read(storage, study, None) for study in STUDIES):
        base = {run.seed: run for run in analysis.baseline_arm.used if run.fitted}
        for arm in analysis.others if analysis.plan.target else ():
            pairs = [
                (run, base[run.seed])
                for run in arm.used
                if run.fitted and run.seed in base
            ]
            if len(pairs) > 2 and (arm.token_cost.estimate or 0) >= 0.1:
                gaps[tuple(run.run_id for run, _ in pairs)] = [
                    [
                        math.log(getattr(run, way) / getattr(other, way))
                        for run, other in pairs
                    ]
                    for way in ("interpolated", "fitted")
                ]
    variances = [[np.var(ways, ddof=1) for ways in both] for both in gaps.values()]
    interpolated, fitted = np.mean(variances, axis=0)
    assert round(math.sqrt(interpolated / fitted), 2) == INTERPOLATED


def test_the_evaluations_of_every_study_are_there_and_a_page_names_it():
    shown = {study for _, (studies, *_), _ in BLOCKS for study in studies.split(",")}
    assert shown <= set(STUDIES)
    pages = " ".join(page.read_text(encoding="utf-8") for page in FOLDER.glob("*.md"))
    assert [study for study in STUDIES if study not in pages] == []


def test_every_figure_is_there_and_shown():
    shown = {
        name
        for page in FOLDER.glob("*.md")
        for name in re.findall(
            r"\]\(figures/([^)]+)\)", page.read_text(encoding="utf-8")
        )
    }
    assert shown == {path.name for path in (FOLDER / "figures").iterdir()}


@pytest.mark.parametrize("crossing", ["confirmed", "first_eval"])
def test_the_page_on_mlperf_follows_from_the_losses_beside_it(tmp_path, crossing):
    page = (FOLDER / "mlperf.md").read_text(encoding="utf-8")
    line = re.search(r"ablate import (csv .*)", page)[1].replace("2_097_152", "2097152")
    settings = ["--crossing", crossing, "--storage", str(tmp_path)]
    command = [sys.executable, "-m", "ablate", "import", *shlex.split(line), *settings]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (arm,) = filler.read(tmp_path, "mlperf-v6", None).others
    page = page.replace("\N{NO-BREAK SPACE}", " ")
    for text in (words.cost(arm.token_cost), words.difference(arm.difference)):
        assert text.replace("\N{NO-BREAK SPACE}", " ") in page
