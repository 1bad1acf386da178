from __future__ import annotations

import csv
import dataclasses
import json
import os
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from synthetic_study import line, reseal

from ablate._version import __version__
from ablate.reports import write_report
from ablate.reports.pages import document
from ablate.reports.pages.render import escape_markdown
from ablate.store import StudyStore

ALL_FILES = {
    "report.html",
    "report.md",
    "report.json",
    "tables/arms.csv",
    "tables/runs.csv",
    "tables/evaluations.csv",
    "tables/arms.tex",
    "tables/matrix.tex",
    "tables/runs.tex",
    "tables/steps.tex",
    "tables/power.tex",
    *(
        f"figures/{name}.{kind}"
        for name in ("token-cost", "convergence", "difference", "sweep")
        for kind in ("svg", "png")
    ),
}


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def strict(text):
    def refuse(token):
        raise AssertionError(token)

    return json.loads(text, parse_constant=refuse)


def test_files_and_their_place(written):
    paths = written("ladder")
    assert paths.html.parents[1].name == "quickstart"
    assert paths.html.name == "report.html"
    assert set(files(paths.html.parent)) == ALL_FILES
    assert all(path.exists() for path in paths.paths())


def test_the_bytes_depend_on_the_study_alone(written, tmp_path):
    report = written("ladder").html.parent
    moved = shutil.copytree(report.parent, tmp_path / "copy" / "quickstart")
    other = write_report(StudyStore(moved), tmp_path / "elsewhere" / "deep")
    assert files(tmp_path / "elsewhere" / "deep") == files(report)
    assert other.json == tmp_path / "elsewhere" / "deep" / "report.json"


@pytest.mark.exhaustive
def test_the_report_of_another_question_is_kept_beside_the_new_one(make_study):
    store = make_study({"a": [line(3, 2, 1)] * 2, "b": [line(3, 2.5, 1), line(3, 2.4, 1)]}, study="asks")
    write_report(store)
    first, plan = files(store.path / "report"), store.plan()
    assert write_report(store).notices == ()
    assert not (store.path / "former-reports").exists()
    for number, changed in enumerate(({"baseline": "b"}, {"paired_seeds": False}, {"intervals": "own"}), 1):
        store.write_plan(dataclasses.replace(plan, **changed))
        (said,) = write_report(store).notices
        assert said == f"The report of another question is kept: asks/former-reports/{number}/report.html."
    assert files(store.path / "former-reports" / "1") == first
    assert write_report(store).notices == ()
    written = write_report(store, store.path / "elsewhere", baseline="b")
    assert write_report(store, store.path / "elsewhere").notices == written.notices == ()


def test_the_contract_of_report_json(written):
    report = strict(written("wide").json.read_text())
    assert report["study"] == "amd-ladder"
    assert report["baseline"] == "fp8"
    assert report["target"]["kind"] == "val_loss"
    assert report["target"]["value"] == 2.09
    assert len(report["arms"]) == 12
    for arm in report["arms"]:
        assert {"name", "n", "hit", "censored", "diverged", "runs"} <= set(arm)
        assert set(arm["final_loss"]) >= {"mean", "low", "high", "difference"}
        for key in ("tokens_to_target", "token_cost"):
            assert set(arm[key]) >= {"estimate", "low", "high"}
        assert arm["n"] == arm["hit"] + arm["censored"] + arm["diverged"]
        assert len(arm["runs"]) == arm["n"] + arm["missing"]
    by_name = {arm["name"]: arm for arm in report["arms"]}
    diverged = by_name["F+D+W SR"]
    assert diverged["diverged"] == 5
    assert diverged["token_cost"]["estimate"] is None
    assert diverged["token_cost"]["high"] is None
    assert diverged["final_loss"]["mean"] is None
    assert by_name["F+D+W plain"]["token_cost"]["estimate"] == pytest.approx(0.22, abs=0.05)
    assert by_name["F H16"]["missing"] == 1
    assert report["take"] is None
    assert [one["arm"] for one in report["findings"]] == [arm["name"] for arm in report["arms"][1:]]
    assert {one["tone"] for one in report["findings"]} == {"open", "more", "diverged"}
    (matrix,) = report["matrices"]
    assert matrix["stabilisers"] == ["none", "SR", "RHT16", "DHT16"]
    assert matrix["gemms"][1] == ["fprop", "dgrad"]
    assert matrix["arms"][1] == ["F+D plain", "F+D SR", "F+D RHT16", None]
    keys = {*report} | {key for arm in report["arms"] for one in (arm, *arm["runs"]) for key in one}
    keys |= {
        key for arm in report["arms"] for value in arm.values() if isinstance(value, dict) for key in value
    }
    page = document.__doc__
    assert {key for key in keys if not re.search(rf"\b{key}\b", page)} == set()


def test_tables_have_full_precision(written):
    paths = written("ladder")
    report = strict(paths.json.read_text())
    with (paths.tables / "arms.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["arm"] for row in rows] == [arm["name"] for arm in report["arms"]]
    assert float(rows[4]["token_cost_low"]) == report["arms"][4]["token_cost"]["low"]
    assert rows[0]["token_cost_estimate"] == ""
    with (paths.tables / "evaluations.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 6 * 2 * 20
    with (paths.tables / "runs.csv").open() as file:
        assert [row["end"] for row in csv.DictReader(file)] == ["hit"] * 12


NASTY = "<script>alert(1)</script> | *a* `b` [c](d) $x^2$ & \\ _e_ #"


@pytest.fixture
def nasty(make_study):
    curves = {NASTY: [line(3, 2, 1), line(3, 2, 1.1)], "b": [line(3, 2, 1.5), line(3, 2, 1.4)]}
    return make_study(
        curves,
        target={"value": 1.8},
        states={("b", 1): "failed"},
        messages={("b", 1): "first\n<img src=x onerror=alert(2)> | end"},
        description="</style><script>alert(3)</script>",
        recipes={"b": "<i>|"},
        dropped=[{"name": "<u>", "reason": "a|b"}],
    )


def test_user_strings_are_escaped_in_html(nasty):
    text = write_report(nasty).html.read_text()
    # The page's own two elements: the data, which no name can end, and the script that reads them.
    _, data, script = re.split("<script[^>]*>", text)
    assert json.loads(data.removesuffix("</script>\n"))["arms"] == [NASTY, "b"]
    assert "alert" not in script
    assert "<img" not in text
    assert "<i>" not in text
    assert "<u>" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_user_strings_are_escaped_in_markdown(nasty):
    text = write_report(nasty).markdown.read_text()
    assert "<script" not in text
    assert "<img" not in text
    assert escape_markdown(NASTY) in text
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", row)) for row in block.splitlines()}
        assert len(widths) == 1, block


def test_what_does_not_print_is_visible_in_markdown_and_csv(make_study):
    curves = {"a": [line(2, 3, 1.5)] * 2, "b\u202e": [line(2, 3, 1.6)] * 2}
    states, messages = {("b\u202e", 1): "failed"}, {("b\u202e", 1): "\x1b[31mred\x1b[0m"}
    found = write_report(make_study(curves, states=states, messages=messages, description="\u202etxet\x07"))
    files = {path.name: path.read_text() for path in found.markdown.parent.rglob("*.[cm][sd]*")}
    assert {"report.md", "arms.csv", "runs.csv", "evaluations.csv"} <= files.keys()
    for name, text in files.items():
        assert not {"\x1b", "\x07", "\u202e"} & set(text), name
    assert r"\x1b[31mred\x1b[0m" in files["runs.csv"]


SNAPSHOTS = Path(__file__).parent / "snapshots"


@pytest.mark.parametrize("study", ["ladder", "wide"])
def test_the_whole_text_is_the_one_that_was_read(written, study):
    """A change of it is to be read as a diff: ``ABLATE_SNAPSHOTS=write pytest …`` takes it over."""
    text = written(study).markdown.read_text().replace(f"ablate {__version__}", "ablate VERSION")
    path = SNAPSHOTS / f"{study}.txt"
    if os.environ.get("ABLATE_SNAPSHOTS") == "write":
        path.write_text(text)
    assert text == path.read_text()


def test_the_page_is_whole_by_itself_and_well_formed(written):
    text = written("wide").html.read_text()
    assert not re.findall(r'(?:src|href)="(?!#|data:)', text)
    assert "url(http" not in text
    assert "@import" not in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    for reference in re.findall(r'(?:href="#|url\(#)([^")]+)', text):
        assert reference in ids
    for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        ET.fromstring(svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))
    for color in ("#1b1f24", "#0072b2", "#d55e00"):
        assert color not in text.split("</style>")[1].lower(), "a colour of the figures escaped the dark mode"


@pytest.mark.parametrize(
    "losses",
    [(3, 3, 3), (1, 2, 3), (3,), (1,), (1, 1), (3, 1), (2, 2, 2), (1e300, 1e-300)],
    ids=lambda losses: "-".join(map(str, losses)),
)
@pytest.mark.parametrize("arms", [1, 2])
def test_strange_curves_give_a_whole_report(make_study, losses, arms):
    curves = {name: [line(*losses), line(*losses)] for name in "ab"[:arms]}
    paths = write_report(make_study(curves, target={"value": 2.0}))
    strict(paths.json.read_text())
    assert paths.html.read_text().endswith("</html>\n")


@pytest.fixture
def small(make_study):
    return make_study({"a": [line(3, 2, 1)] * 2, "b": [line(3, 2.5, 1.5)] * 2})


def test_a_damaged_run_is_named_in_the_report(small):
    run = small.run(small.plan().arms[0].runs[0].id)
    with run.metrics_path.open("ab") as file:
        file.write(b'{"kind":"eval"}\n')
    reseal(run)
    report = strict(write_report(small).json.read_text())
    assert any(f"runs/{run.run_id}/metrics.jsonl:7" in warning for warning in report["warnings"])
    assert not any(str(small.path) in warning for warning in report["warnings"])


def test_a_failing_write_leaves_the_old_page(small, monkeypatch):
    html = write_report(small).html
    before = html.read_bytes()
    from ablate.base import files as store_files

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(store_files.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_report(small)
    assert html.read_bytes() == before
    assert not list(html.parent.rglob(".*"))
