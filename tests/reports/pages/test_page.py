"""The page in a real browser: no overflow, no error, no request to the network."""

from __future__ import annotations

import json
import re
from importlib.resources import files

import numpy as np
import pandas as pd
import pytest
from found_search import found_search
from synthetic_study import build_study, smooth_curve

from ablate.reports import analyse, load_frames
from ablate.reports.findings.compare import compare
from ablate.reports.pages.compare import write_comparison, write_search
from ablate.reports.read.rebase import read_against
from ablate.reports.words import format as words
from ablate.store import StudyStore


def open_page(browser, path, width, scheme="light"):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
    )
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
    )
    browser.get(path.as_uri())


MOVE = """
const slider = document.getElementById('live-target');
slider.value = arguments[0];
slider.dispatchEvent(new Event('input'));
return [
  [...document.querySelectorAll('.live tbody tr')].map(
    row => [...row.cells].map(cell => cell.innerText.trim())),
  document.getElementById('live-note').innerText,
  [...document.querySelectorAll('figure line.moved')].map(line => +line.getAttribute('y1')),
];
"""


def test_at_a_moved_target_the_page_says_what_a_report_of_that_target_says(
    browser, written
):
    page = written("wide").html
    open_page(browser, page, 1280)
    data = browser.execute_script(
        "return JSON.parse(document.getElementById('live-data').textContent)"
    )
    frames = load_frames(StudyStore(page.parents[1]))
    notes = []
    for place in (1, data["own"], len(data["targets"]) - 1):
        rows, note, heights = browser.execute_script(MOVE, place)
        notes.append(note)
        analysis = analyse(read_against(frames, target=data["targets"][place]))
        for row, arm in zip(rows, analysis.arms, strict=True):
            assert row == [
                arm.name,
                words.interval(arm.tokens_to_target, words.tokens).partition(" [")[0],
                words.cost(arm.token_cost).partition(" [")[0],
                words.ends(arm.runs),
            ]
        axis = data["axes"][0]
        low, high = axis["y"]
        share = (axis["box"][3] - heights[0]) / (axis["box"][3] - axis["box"][1])
        assert low + share * (high - low) == pytest.approx(data["targets"][place])
    assert [note.startswith("A moved target: point estimates") for note in notes] == [
        True,
        False,
        True,
    ]
    # at the lowest target some runs have not arrived
    assert any(row[2].startswith(">") for row in rows)


def test_arms_go_and_come_back_in_print_and_values_are_those_of_the_curves(
    browser, written
):
    paths = written("ladder")
    open_page(browser, paths.html, 1280)
    shown = """
    const parts = [...document.querySelectorAll('[id^="convergence-arm4-"]')];
    return [parts.length, parts.filter(part => getComputedStyle(part).display !== 'none').length,
            getComputedStyle(document.querySelector('.live')).display]
    """
    browser.execute_script("document.querySelectorAll('.live tbody input')[4].click()")
    parts, drawn, _ = browser.execute_script(shown)
    assert (parts > 5, drawn) == (True, 0)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert browser.execute_script(shown) == [parts, parts, "none"]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    tip = browser.execute_script(
        """
        const { axes, runs } = JSON.parse(document.getElementById('live-data').textContent);
        const svg = document.querySelector('#convergence figure svg'), { box, x, y } = axes[0];
        const losses = runs[0][3], tokens = runs[0][2];
        const at = new DOMPoint(
          box[0] + (tokens[2] - x[0]) / (x[1] - x[0]) * (box[2] - box[0]),
          box[3] - (losses[2] - y[0]) / (y[1] - y[0]) * (box[3] - box[1]),
        ).matrixTransform(svg.getScreenCTM());
        const event = { clientX: at.x, clientY: at.y, bubbles: true };
        svg.dispatchEvent(new PointerEvent('pointermove', event));
        return document.querySelector('.tip').innerText;
        """
    )
    table = pd.read_csv(paths.tables / "evaluations.csv")
    row = table[(table.arm == "bf16") & (table.seed == 0)].iloc[2]
    text = f"{row.val_loss:.4f} nats/token after {row.tokens:,} tokens"
    assert tip == f"bf16, seed 0: {text}"


def faults_of_access(browser):
    """Return what axe-core finds, one line each."""
    source = (files("axe_core_python") / "axe.min.js").read_text()
    browser.execute_script(source)
    result = browser.execute_async_script(
        "const done = arguments[0]; axe.run().then(done)"
    )
    return [
        f"{fault['impact']}: {fault['id']}: {node['html'][:200]}"
        for fault in result["violations"]
        for node in fault["nodes"]
    ]


LONG = pytest.mark.exhaustive
SIZES = [(360, "dark"), (1280, "light")]
SIZES += [
    pytest.param(*size, marks=LONG)
    for size in ((360, "light"), (1280, "dark"), (768, "light"), (768, "dark"))
]
"""Widths in pixels, and colours: axe takes seconds for each, so that most are a long proof."""


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    """The pages of a comparison, a trend and two searches, by name."""
    folder = tmp_path_factory.mktemp("beside")
    rng = np.random.default_rng(1)
    curves = {}
    for name in ("bf16", "fp4", "fp4 with a long name"):
        curves[name] = [smooth_curve(rng) for _ in range(2)]
    frames = []
    for width in (64, 128, 256):
        study = f"a_study_of_width_{width}"
        store = build_study(folder, curves, study=study, model={"width": width})
        frames.append(load_frames(store))
    sides = [analyse(frame) for frame in frames]
    pages = {
        "compare": write_comparison(compare(sides[:2], frames[:2]), folder / "compare"),
        "trend": write_comparison(compare(sides, frames), folder / "trend"),
        "search": write_search(found_search(), folder / "search", "name: s\n"),
    }
    return {name: paths[-1] for name, paths in pages.items()}


PAGES = [
    "ladder",
    "long_words",
    "compare",
    "trend",
    "search",
    pytest.param("wide", marks=LONG),
]


@pytest.mark.parametrize(("width", "scheme"), SIZES)
@pytest.mark.parametrize("page", PAGES)
def test_no_page_overflows_or_asks_the_network_and_axe_finds_no_fault(
    browser, written, beside, page, width, scheme
):
    path = beside.get(page) or written(page).html
    browser.get_log("performance")
    browser.get_log("browser")
    open_page(browser, path, width, scheme)
    assert not browser.execute_script(
        "return document.scrollingElement.scrollWidth > innerWidth"
    )
    assert browser.get_log("browser") == []
    urls = set()
    for entry in browser.get_log("performance"):
        event = json.loads(entry["message"])["message"]
        if event["method"] == "Network.requestWillBeSent":
            urls.add(event["params"]["request"]["url"])
    assert {url for url in urls if not url.startswith("data:")} == {path.as_uri()}
    assert faults_of_access(browser) == []


@pytest.mark.parametrize("page", ["ladder", "compare", "trend", "search"])
def test_figures_are_legible_on_a_tablet_and_keep_their_numbers_on_a_telephone(
    browser, written, beside, page
):
    path = beside.get(page) or written(page).html
    letters = """
    return [...document.querySelectorAll('figure svg text')].map(text => [
      text.textContent,
      parseFloat(getComputedStyle(text).fontSize) * text.ownerSVGElement.getScreenCTM().a,
      text.getBoundingClientRect().right]);
    """
    open_page(browser, path, 800)
    assert min(size for _, size, _ in browser.execute_script(letters)) >= 11
    open_page(browser, path, 400)
    shown = browser.execute_script(letters)
    numbers = [right for text, _, right in shown if re.search(r"\[|^\d\.\d{4}", text)]
    assert max(numbers, default=0) <= 400 or page in ("compare", "trend")
    # names, or numbers of the forest's rows and of the legend
    assert (len(numbers) >= 11) == (page == "ladder")


def test_axe_is_at_work(browser, tmp_path):
    page = tmp_path / "bad.html"
    page.write_text(
        '<!DOCTYPE html><html><head><title>t</title></head><body><img src="data:,"></body></html>'
    )
    open_page(browser, page, 360)
    assert any("image-alt" in fault for fault in faults_of_access(browser))


def test_figures_have_enough_contrast_in_dark_and_light(browser, written):
    """Of the page's letters axe looks at that."""
    script = """
    const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map(v => { v /= 255;
        return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4 });
        return .2126 * r + .7152 * g + .0722 * b };
    const page = light(getComputedStyle(document.body).backgroundColor);
    const ratio = c => (Math.max(light(c), page) + .05) / (Math.min(light(c), page) + .05);
    const hues = [0, 1, 2, 3, 4, 5].map(hue => {
        document.body.style.setProperty('outline-color', `var(--hue${hue})`);
        return ratio(getComputedStyle(document.body).outlineColor);
    });
    const letters = [...document.querySelectorAll('svg text')].map(e => ratio(getComputedStyle(e).fill));
    return [Math.min(...hues), Math.min(...letters)];
    """
    for scheme in ("light", "dark"):
        open_page(browser, written("ladder").html, 1280, scheme)
        lines, letters = browser.execute_script(script)
        assert (lines >= 2.7, letters >= 4.5) == (True, True), (scheme, lines, letters)


@pytest.mark.exhaustive
def test_labels_of_the_figures_do_not_overlap(browser, written):
    open_page(browser, written("wide").html, 1280)
    overlaps = browser.execute_script(
        """
        const clash = [];
        for (const svg of document.querySelectorAll('figure svg')) {
          const boxes = [...svg.querySelectorAll('text')].map(
            t => [t.textContent, t.getBoundingClientRect()]);
          for (let i = 0; i < boxes.length; i++) for (let j = 0; j < i; j++) {
            const [a, b] = [boxes[i][1], boxes[j][1]];
            const x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
            const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
            if (x > 1 && y > 4) clash.push([boxes[i][0], boxes[j][0], x, y]);
          }
        }
        return clash;
        """
    )
    assert overlaps == []
