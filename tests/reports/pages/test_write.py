from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from xml.etree import ElementTree as ET

import pandas as pd
import pytest
from synthetic_study import ladder_study, lines
from texts import check_page

from ablate import open_study
from ablate.base import files as base_files
from ablate.reports import write_report
from ablate.reports.pages import document
from ablate.reports.pages.render import escape_markdown
from ablate.store import StudyStore

FIGURES = {"token-cost", "convergence", "difference", "sweep"}
ALL_FILES = {
    *("report.html", "report.md", "report.json"),
    *(f"tables/{name}.csv" for name in ("arms", "runs", "evaluations")),
    *(
        f"tables/{name}.tex"
        for name in ("arms", "matrix", "runs", "steps", "power", "pairs")
    ),
    *(f"figures/{name}.{kind}" for name in FIGURES for kind in ("svg", "png")),
}


def files(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def strict(paths):
    def refuse(token):
        raise AssertionError(token)

    return json.loads(paths.json.read_text(), parse_constant=refuse)


def test_the_bytes_depend_on_the_study_alone(written, tmp_path):
    report = written("ladder").html.parent
    moved = shutil.copytree(report.parent, tmp_path / "copy" / "quickstart")
    write_report(StudyStore(moved), tmp_path / "elsewhere" / "deep")
    assert files(tmp_path / "elsewhere" / "deep") == files(report)
    assert set(files(report)) == ALL_FILES


def test_the_contract_of_report_json(written):
    report = strict(written("wide"))
    for arm in report["arms"]:
        ended = arm["hit"] + arm["censored"] + arm["diverged"]
        assert arm["n"] == ended == len(arm["runs"]) - arm["missing"]
        loss = arm["final_loss"]
        assert not {"figure", "moderated"} & {*loss, *loss["difference"]}
    names = ["F+D plain", "F+D SR", "F+D RHT16", None]
    assert report["matrices"][0]["arms"][1] == names
    inside = [
        part for arm in report["arms"] for part in (arm, *arm["runs"], *arm.values())
    ]
    keys = {key for part in (report, *inside) if isinstance(part, dict) for key in part}
    assert not [key for key in keys if not re.search(rf"\b{key}\b", document.__doc__)]


def test_tables_are_the_frames_of_a_notebook(written):
    paths = written("wide")
    study = open_study(paths.html.parents[1])
    frames = {
        "arms": study.costs(),
        "runs": study.runs(),
        "evaluations": study.curves(),
    }
    for name, frame in frames.items():
        table = pd.read_csv(paths.tables / f"{name}.csv")
        pd.testing.assert_frame_equal(table, frame, check_dtype=False, check_exact=True)


NASTY = "<script>alert(1)</script> | *a* `b` [c](d) $x^2$ & \\ _e_ #"


def test_user_strings_are_escaped(make_study):
    store = make_study(
        lines(f"{NASTY}: 3 2 1, 3 2 1.1; b\u202e: 3 2 1.5, 3 2 1.4"),
        target={"value": 1.8},
        states={("b\u202e", 1): "failed"},
        messages={("b\u202e", 1): "\x1b[31mfirst\n<img src=x onerror=alert(2)> | end"},
        description="\u202etxet\x07</style><script>alert(3)</script>",
        recipes={"b\u202e": "<i>|"},
        dropped=[{"name": "<u>", "reason": "a|b"}],
    )
    paths = write_report(store)
    html, markdown = paths.html.read_text(), paths.markdown.read_text()
    # The page's own two elements: the data, which no name can end, and the script that reads them.
    _, data, script = re.split("<script[^>]*>", html)
    assert json.loads(data.removesuffix("</script>\n"))["arms"] == [NASTY, "b\u202e"]
    assert "alert" not in script
    assert not re.search("<img|<i>|<u>", html)
    assert "&lt;script&gt;alert(1)" in html
    assert not re.search("<script|<img", markdown)
    assert escape_markdown(NASTY) in markdown
    for block in re.findall(r"(?:^\|.*\n)+", markdown, flags=re.MULTILINE):
        assert (
            len({len(re.findall(r"(?<!\\)\|", row)) for row in block.splitlines()}) == 1
        ), block
    shown = [paths.markdown, *paths.tables.glob("*.csv")]
    assert len(shown) == 4
    for path in shown:  # what does not print is visible
        assert not {"\x1b", "\x07", "\u202e"} & set(path.read_text()), path
    for svg in paths.figures.glob("*.svg"):
        assert "<script" not in svg.read_text()


@pytest.mark.parametrize("study", ["ladder", "wide"])
def test_the_whole_text_is_the_one_that_was_read(written, study):
    check_page(study, written(study).markdown)


def test_the_page_is_whole_by_itself_and_well_formed(written):
    text = written("wide").html.read_text()
    assert not re.findall(r'(?:src|href)="(?!#|data:)|url\(http|@import', text)
    assert "<code>ablate check steps STUDY</code> on native hardware" in text
    assert "`" not in re.sub(
        "<script.*", "", text.split("</style>")[1], flags=re.DOTALL
    )
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', text)) <= set(ids)
    for table in re.findall(r"<table.*?</table>", text, flags=re.DOTALL):
        assert re.search(
            r'<caption>.*<th scope="col".*<th scope="row"', table, flags=re.DOTALL
        ), table
    for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        ET.fromstring(
            svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
        )
    for color in ("#1b1f24", "#0072b2", "#d55e00"):
        assert color not in text.split("</style>")[1].lower(), (
            "a colour of the figures escaped the dark mode"
        )


STRANGE = {
    "nothing": lines("a: ; b: "),
    "one point": lines("a: 1; b: 3"),
    "constant": lines("a: 3 3 3; b: 3 3 3"),
    "at the target": lines("a: 2 2 2; b: 2 2 2"),
    "one arm": lines("a: 3 1"),
    "rising": lines("a: 1 2 3; b: 1 1 1"),
    "none in common": lines("a: 3 1") | {"b": [[(150, 3.0), (250, 1.0)]]},
    "huge": lines("a: 1e-3 1e6; b: 1e6 1e-3"),
}


@pytest.mark.parametrize("curves", STRANGE.values(), ids=STRANGE)
def test_strange_curves_give_a_whole_report(make_study, curves, recwarn):
    paths = write_report(make_study(curves, target={"value": 2.0}))
    assert strict(paths)["study"]
    assert paths.html.read_text().endswith("</html>\n")
    assert [str(warning.message) for warning in recwarn] == []


@pytest.fixture
def small(make_study):
    return make_study(lines("a: 3 2 1, 3 2 1; b: 3 2.5 1.5, 3 2.5 1.5"))


def test_a_page_on_another_question_leaves_its_own_files_alone(tmp_path):
    store, out = ladder_study(tmp_path), tmp_path / "out"
    store.write_plan(replace(store.plan(), target=None))
    asked = write_report(store, out, target=2.2)
    assert (asked.tables / "matrix.tex").exists()
    (own := asked.figures / "drawn by hand.svg").write_text("kept")
    write_report(store, out)
    assert own.read_text() == "kept"
    own.unlink()
    assert files(out) == files(write_report(store).html.parent)


def test_a_damaged_run_is_named_in_the_report(small):
    run = small.run(small.plan().arms[0].runs[0].id)
    with run.metrics_path.open("ab") as file:
        file.write(b'{"kind":"eval"}\n')
    warnings = " ".join(strict(write_report(small))["warnings"])
    assert f" runs/{run.run_id}: metrics.jsonl: altered or cut" in warnings
    assert str(small.path) not in warnings


def test_a_failing_write_leaves_the_old_page(small, monkeypatch):
    html = write_report(small).html
    before = html.read_bytes()

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(base_files.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_report(small)
    assert html.read_bytes() == before
    assert not list(html.parent.rglob(".*"))
