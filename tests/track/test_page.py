"""What a person sees: MLflow's own pages of a finished study in a real browser.

With ABLATE_PICTURES=docs/images it renews the documentation's picture.
"""

import os
import time
from pathlib import Path

import pytest

from ablate.cli.report import page
from ablate.reports import write_report
from ablate.track.mirror import Mirror

PICTURES = (
    Path(os.environ["ABLATE_PICTURES"]) if "ABLATE_PICTURES" in os.environ else None
)


@pytest.fixture
def see(browser):
    """Open a page, wait until it shows all the words, and give its text."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    def is_there(wanted):
        text = browser.find_element(By.TAG_NAME, "body").text
        return text if all(part in text for part in wanted) else None

    def open_page(address, *wanted):
        if address:
            browser.get(address)
        return WebDriverWait(browser, 240).until(lambda _: is_there(wanted))

    return open_page


@pytest.mark.exhaustive
def test_a_finished_study_its_report_and_the_pages_of_a_run(
    make_study, server, browser, see
):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    study = make_study(name="pages", arms=("bf16", "fprop", "all three")).whole(
        60, files="metrics system"
    )
    study.plan["target"]["value"] = 3.0
    study.write_plan()
    write_report(study.store)
    experiment = Mirror(study.store, server).sync_once().experiment_id
    names = [f"s{seed} {arm}" for arm, seed in study.runs]
    address = page(server, experiment)
    text = see(
        address,
        "Which GEMM suffers?",
        "report: pages",
        "val_loss",
        "train_loss",
        "200k",
        *names,
    )
    browser.find_element(
        By.CSS_SELECTOR, "[data-component-id='mlflow.assistant.chat_panel.close']"
    ).click()
    if PICTURES:
        WebDriverWait(browser, 60).until(
            lambda _: not browser.find_elements(By.CSS_SELECTOR, "[class*=spinner]")
        )
        time.sleep(2)  # the charts take the panel's place
        browser.save_screenshot(str(PICTURES / "mlflow.png"))
    assert all(f"{name} (val_loss)" in text for name in names)
    charts = [line for line in text.splitlines() if line in ("val_loss", "train_loss")]
    assert charts[:2] == ["val_loss", "train_loss"]

    # From a run's description to the report, by its link.
    run = study.held(server)["all three", 1]
    see(
        f"{server}/#/experiments/{experiment}/runs/{run.info.run_id}",
        "The study's report",
    )
    [link, *_] = browser.find_elements(By.PARTIAL_LINK_TEXT, "The study's report")
    report_page = link.get_attribute("href")

    # The report itself, in the artifact viewer of the summary run: a frame that runs and loads nothing.
    assert study.held(server)["summary"].info.run_id in report_page
    browser.get(report_page)
    frame = WebDriverWait(browser, 240).until(
        lambda _: browser.find_elements(By.TAG_NAME, "iframe")
    )[0]
    browser.switch_to.frame(frame)
    see(None, "Verdict", "Arms against the baseline", "How to repeat it")
    assert browser.find_elements(By.CSS_SELECTOR, "figure svg")
    wide, inner = browser.execute_script(
        "return [document.scrollingElement.scrollWidth, innerWidth]"
    )
    assert wide <= inner

    # The experiment's page as a table, with the columns that the study asks for.
    browser.switch_to.default_content()
    browser.get("about:blank")
    see(
        address.replace("=CHART", "=TABLE"),
        "arm.recipe.gemms",
        "fprop+dgrad+wgrad",
        "val_loss",
        "token_cost",
    )
    pages = f"{server}/#/experiments/{experiment}/runs/{run.info.run_id}"
    see(f"{pages}/system-metrics", "cpu_utilization_percentage")
    text = see(
        f"{pages}/model-metrics",
        "s1 all three (val_loss)",
        "Step",
        "200k",
        "train_loss",
        "grad_norm",
    )
    assert "NaN" not in text
