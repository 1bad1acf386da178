"""What a person sees: MLflow's own pages of a finished study in a real browser."""

import shutil

import pytest

from ablate.cli.dashboard import page
from ablate.reports import write_report
from ablate.track import Mirror

selenium = pytest.importorskip("selenium")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")


@pytest.fixture
def browser(tmp_path):
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--window-size=1600,1400",
        f"--user-data-dir={tmp_path / 'profile'}",
    ):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def test_pages_of_a_finished_study(make_study, server, browser, held, tmp_path):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    def wait_for_text(*wanted):
        def is_there(_):
            text = browser.find_element(By.TAG_NAME, "body").text
            return text if all(part in text for part in wanted) else None

        return WebDriverWait(browser, 60).until(is_there)

    study = make_study(name="pages", arms=("bf16", "fprop", "all three"), seeds=(0, 1)).whole(60)
    write_report(study.store)
    report = Mirror(study.store, server).sync_once()
    assert report.problem is None

    browser.get(page(server, report.experiment_id))
    names = [f"{arm} seed {seed}" for arm, seed in study.runs]
    text = wait_for_text("Which GEMM suffers?", "report: pages", "val_loss", "200k", *names)
    browser.save_screenshot(str(tmp_path / "experiment.png"))
    assert all(f"{name} (val_loss)" in text for name in names)

    run = held(study, server)[study.runs["all three", 1]]
    browser.get(f"{server}/#/experiments/{report.experiment_id}/runs/{run.info.run_id}/model-metrics")
    text = wait_for_text("all three seed 1 (val_loss)", "Step", "200k")
    browser.save_screenshot(str(tmp_path / "run.png"))
    charts = [name for name in ("train_loss", "val_loss", "val_perplexity", "grad_norm") if name in text]
    assert len(charts) == 4
    assert "NaN" not in text

    # The report itself, in the artifact viewer of the summary run: a frame that runs and loads nothing.
    summary = held(study, server)["summary"]
    browser.get(
        f"{server}/#/experiments/{report.experiment_id}/runs/{summary.info.run_id}/artifacts/report/report.html"
    )
    frame = WebDriverWait(browser, 60).until(lambda _: browser.find_elements(By.TAG_NAME, "iframe"))[0]
    browser.switch_to.frame(frame)
    wait_for_text("Verdict", "Arms against the baseline", "How to repeat it")
    assert browser.find_elements(By.CSS_SELECTOR, "figure svg")
    wide, inner = browser.execute_script("return [document.scrollingElement.scrollWidth, innerWidth]")
    assert wide <= inner
