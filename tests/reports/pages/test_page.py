"""The page in a real browser: no overflow, no error, no request to the network."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files

import numpy as np
import pytest
from found_search import found_search, wide_search
from synthetic_study import build_study, ladder_study, line, smooth_curve

from ablate.reports import analyse, load_frames, write_report
from ablate.reports.findings.compare import compare
from ablate.reports.findings.trend import trend
from ablate.reports.pages.beside import write_comparison, write_search, write_trend

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


def open_page(browser, path, width, scheme="light"):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
    )
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    browser.get(path.as_uri())


def requests(browser):
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return {
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    }


@pytest.fixture
def long_words(make_study):
    name = "mxfp4_everywhere_with_a_name_that_does_not_break_" * 3
    return make_study(
        {"a": [line(3, 2, 1)], name: [line(3, 2, 1.2)]},
        study="a_study_with_a_rather_long_name_that_has_no_space_in_it_at_all",
        states={(name, 0): "diverged"},
        messages={(name, 0): "x" * 300},
        description="y" * 200,
        target={"value": 1.5},
    )


@pytest.mark.parametrize("width", [360, 768, 1280])
@pytest.mark.parametrize("study", ["ladder", "wide", "long_words"])
def test_no_overflow_no_error_no_network(request, browser, study, width):
    page = write_report(request.getfixturevalue(study)).html
    browser.get_log("performance")
    browser.get_log("browser")
    open_page(browser, page, width)
    wide, inner = browser.execute_script("return [document.scrollingElement.scrollWidth, innerWidth]")
    assert wide <= inner
    assert browser.get_log("browser") == []
    assert {url for url in requests(browser) if not url.startswith("data:")} == {page.as_uri()}


def faults_of_access(browser):
    """Return what axe-core finds, one line each."""
    source = (files("axe_core_python") / "axe.min.js").read_text()
    browser.execute_script(source)
    found = browser.execute_async_script("const done = arguments[0]; axe.run().then(done)")
    return [
        f"{fault['impact']}: {fault['id']}: {node['html'][:200]}"
        for fault in found["violations"]
        for node in fault["nodes"]
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("study", ["ladder", "wide"])
def test_axe_finds_no_fault(request, browser, study, width, scheme):
    open_page(browser, write_report(request.getfixturevalue(study)).html, width, scheme)
    assert faults_of_access(browser) == []


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_two_studies_side_by_side(browser, tmp_path, width):
    frames = tuple(load_frames(ladder_study(tmp_path / name, seed=len(name))) for name in ("a", "bb"))
    left, right = (analyse(frame) for frame in frames)
    pages = write_comparison(compare(left, right, frames, ("a", "bb")), tmp_path / "out")
    open_page(browser, pages[-1], width)
    wide, inner = browser.execute_script("return [document.scrollingElement.scrollWidth, innerWidth]")
    assert wide <= inner
    assert faults_of_access(browser) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_a_trend_over_sizes(browser, tmp_path, width, scheme):
    rng = np.random.default_rng(1)
    curves = {name: [smooth_curve(rng) for _ in range(2)] for name in ("bf16", "fp4", "fp4 with a long name")}
    frames = [
        load_frames(build_study(tmp_path, curves, study=f"a_study_of_width_{size}", model={"width": size}))
        for size in (64, 128, 256)
    ]
    page = write_trend(trend([analyse(frame) for frame in frames], frames), tmp_path / "out")[-1]
    open_page(browser, page, width, scheme)
    wide, inner = browser.execute_script("return [document.scrollingElement.scrollWidth, innerWidth]")
    assert wide <= inner
    assert faults_of_access(browser) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("found", [found_search(), wide_search()], ids=["two budgets", "wide"])
def test_a_search(browser, tmp_path, found, width, scheme):
    page = write_search(found, tmp_path, "name: s\n")[-1]
    open_page(browser, page, width, scheme)
    wide, inner = browser.execute_script("return [document.scrollingElement.scrollWidth, innerWidth]")
    assert wide <= inner
    assert faults_of_access(browser) == []


def test_axe_is_at_work(browser, tmp_path):
    page = tmp_path / "bad.html"
    page.write_text(
        '<!DOCTYPE html><html><head><title>t</title></head><body><img src="data:,"></body></html>'
    )
    open_page(browser, page, 360)
    assert any("image-alt" in fault for fault in faults_of_access(browser))


def test_dark_and_light_have_enough_contrast(browser, ladder):
    page = write_report(ladder).html
    script = """
    const rgb = text => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
    const light = c => { const [r, g, b] = rgb(c).map(v => { v /= 255;
        return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4 });
        return .2126 * r + .7152 * g + .0722 * b };
    const page = light(getComputedStyle(document.body).backgroundColor);
    const ratio = c => { const l = light(c);
        return (Math.max(l, page) + .05) / (Math.min(l, page) + .05) };
    const found = {};
    for (const e of document.querySelectorAll('p, td, th, caption, figcaption, svg text, a'))
        if (!e.closest('.skip')) {
            const style = getComputedStyle(e);
            const color = e.closest('svg') ? style.fill : style.color;
            found[color] = ratio(color);
        }
    for (const name of ['hue0', 'hue1', 'hue2', 'hue3', 'hue4', 'hue5']) {
        document.body.style.setProperty('outline-color', `var(--${name})`);
        found[name] = ratio(getComputedStyle(document.body).outlineColor);
    }
    return found;
    """
    for scheme in ("light", "dark"):
        open_page(browser, page, 1280, scheme)
        found = browser.execute_script(script)
        text = {color: ratio for color, ratio in found.items() if not color.startswith("hue")}
        assert min(text.values()) >= 4.5, (scheme, text)
        lines = {color: ratio for color, ratio in found.items() if color.startswith("hue")}
        assert min(lines.values()) >= 2.7, (scheme, lines)


def test_the_page_is_built_for_readers_of_all_kinds(browser, wide):
    open_page(browser, write_report(wide).html, 1280)
    found = browser.execute_script(
        """
        const levels = [...document.querySelectorAll('h1,h2,h3')].map(h => +h.tagName[1]);
        return {
          levels,
          tables: [...document.querySelectorAll('table')].every(
            t => t.caption && t.querySelector('th[scope=col]') && t.querySelector('th[scope=row]')),
          pictures: [...document.querySelectorAll('figure svg')].map(
            s => s.getAttribute('aria-label').length),
          landmarks: ['main', 'nav', 'header'].every(tag => document.querySelector(tag)),
          language: document.documentElement.lang,
        }
        """
    )
    assert found["levels"][0] == 1
    assert found["levels"].count(1) == 1
    assert all(
        after - before <= 1 for before, after in zip(found["levels"], found["levels"][1:], strict=False)
    )
    assert found["tables"]
    assert len(found["pictures"]) == 5
    assert min(found["pictures"]) > 40
    assert found["landmarks"]
    assert found["language"] == "en"


def test_labels_of_the_figures_do_not_overlap(browser, wide):
    open_page(browser, write_report(wide).html, 1280)
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
