"""The tables of ``docs/findings`` are what today's analysis makes of the evaluations that lie beside them.

Those that rest on more than losses (diagnostics, configurations) need the runs, and
``benchmarks/findings.py --check``.
"""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from ablate.cli import cli
from ablate.study import load_study

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "findings"
FROM_LOSSES = ("headline", "places", "losses")


def load_filler():
    spec = importlib.util.spec_from_file_location("findings", ROOT / "benchmarks" / "findings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


filler = load_filler()
BLOCKS = [
    (page.name, shlex.split(match[2]), match[3])
    for page in sorted(FOLDER.glob("*.md"))
    for match in filler.BLOCK.finditer(page.read_text(encoding="utf-8"))
]
STUDIES = sorted(path.stem for path in (FOLDER / "data").glob("*.csv"))


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    folder = tmp_path_factory.mktemp("storage")
    for name in STUDIES:
        study = load_study(ROOT / "studies" / "findings" / f"{name}.yaml")
        arguments = ["--study", name, "--baseline", study.baseline, "--storage", str(folder)]
        arguments += ["--target", f"{study.target.kind}={study.target.value!r}"]
        arguments += ["--paired"] if study.paired_seeds else []
        done = CliRunner().invoke(cli, ["import", "csv", str(FOLDER / "data" / f"{name}.csv"), *arguments])
        assert done.exit_code == 0, done.output
    return folder


def rows_without(table, name):
    """Split a Markdown table into cells, without one of its columns (logs tell no recipes)."""
    rows = [re.split(r"(?<!\\) \| ", line[2:-2]) for line in table.splitlines() if line.startswith("| ")]
    keep = [i for i, head in enumerate(rows[0]) if head != name]
    return [[row[i] for i in keep] for row in rows]


@pytest.mark.parametrize(
    ("what", "on_the_page"),
    [
        pytest.param(what, text, id=f"{page}: {' '.join(what)}", marks=[pytest.mark.exhaustive] * bool(n % 5))
        for n, (page, what, text) in enumerate(BLOCKS)
        if what[1] in FROM_LOSSES and "," not in what[0]
    ],
)
def test_tables_follow_from_the_evaluations(storage, what, on_the_page):
    study, kind, *settings = what
    found, _ = filler.block(storage, study, kind, dict(one.split("=", 1) for one in settings))
    assert rows_without(found, "Recipe") == rows_without(on_the_page, "Recipe")


def test_the_evaluations_of_every_study_are_there():
    named = {study for _, (studies, *_), _ in BLOCKS for study in studies.split(",")}
    assert named == set(STUDIES)


def test_every_figure_is_there_and_shown():
    shown = {
        name
        for page in FOLDER.glob("*.md")
        for name in re.findall(r"\]\(figures/([^)]+)\)", page.read_text(encoding="utf-8"))
    }
    assert shown == {path.name for path in (FOLDER / "figures").iterdir()}
