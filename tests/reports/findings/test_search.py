"""A search's pages: the front as found, nothing that reads as measured or certain, no markup from names."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from found_search import found_search, point
from optuna.distributions import CategoricalDistribution
from optuna.trial import create_trial
from texts import check_page

from ablate.reports.figures.panels import draw_front
from ablate.reports.findings.search import Rung
from ablate.reports.pages.compare import write_search
from ablate.reports.words.search import front_table, search_sentences, trials_table
from ablate.search.halving import importances


def test_a_budget_that_was_not_reached_is_not_the_last():
    found = found_search()
    begun = replace(found, rungs=(found.rungs[0], replace(found.rungs[1], points=())))
    assert [row[0] for row in front_table(begun).rows] == ["F+D sr", "F sr", "bf16"]
    assert not begun.is_done
    assert "The search has not ended." in search_sentences(begun)


def test_a_front_of_the_baseline_alone_has_nothing_to_confirm(tmp_path):
    baseline = point(0, "bf16", 2.0, 1.0, on_front=True)
    alone = found_search(rungs=(Rung(tokens=1000, points=(baseline,)),))
    assert "so there is nothing to confirm" in search_sentences(alone)[-1]
    (tmp_path / "confirm.yaml").write_text("of an earlier search")
    write_search(alone, tmp_path, None)
    assert not (tmp_path / "confirm.yaml").exists()


def test_token_costs_are_percentages_and_a_miss_is_a_bound():
    points = (
        point(0, "bf16", 0.0, 1.0, on_front=True),
        point(1, "F sr", 0.12, 0.8, on_front=True),
        point(2, "F none", 0.5, 0.7, end="missed"),
    )
    rung = Rung(tokens=1000, points=points)
    found = found_search(objective="token_cost", rungs=(rung,))
    assert [row[1] for row in front_table(found).rows] == ["+12.0\u00a0%", "0.0\u00a0%"]
    assert trials_table(found, rung).rows[2][4] == "missed (> +50.0\u00a0%)"
    assert "1 run missed the target." in search_sentences(found)
    assert draw_front(found) is not None


def test_the_whole_text_is_the_one_that_was_read(tmp_path):
    write_search(found_search(), tmp_path, "name: s\n")
    assert {path.name for path in tmp_path.iterdir()} == {
        "search.html", "search.md", "search.json", "front.svg", "front.png", "confirm.yaml",
    }  # fmt: skip
    check_page("search", tmp_path / "search.md")
    page = (tmp_path / "search.html").read_text()
    write_search(found_search(loss_unit="bits/token"), tmp_path / "bits", None)
    in_bits = (tmp_path / "bits" / "search.html").read_text()
    assert "nats" not in in_bits
    assert in_bits.count("bits/token") == page.count("nats/token")
    assert "<b>" not in page
    assert "<recipe>" not in page
    document = json.loads((tmp_path / "search.json").read_text())
    assert document["rungs"][1]["points"][2]["modelled_time"] == 0.7


def test_before_any_result_there_is_no_figure(tmp_path):
    rung = Rung(tokens=1000, points=(point(0, "bf16", None, 1.0, end="open"),))
    unknown = {"loss": None, "modelled_time": None}
    empty = found_search(rungs=(rung,), importances=unknown)
    assert draw_front(empty) is None
    write_search(empty, tmp_path, None)
    assert "Too few trials" in (tmp_path / "search.html").read_text()


def test_importances_find_the_factor_that_matters():
    labels = {"a": ("0", "1", "2"), "b": ("x", "y", "z")}
    kinds = {name: CategoricalDistribution(values) for name, values in labels.items()}
    trials = []
    for a, b in itertools.product(*labels.values()):
        params = {"a": a, "b": b}
        values = [float(a), 1.0]
        trials.append(create_trial(params=params, distributions=kinds, values=values))
    shares = importances(labels, trials, 0)
    assert shares["a"] > 0.9
    assert sum(shares.values()) == pytest.approx(1.0)
    assert importances(labels, trials, 1) is None  # it does not vary
    assert importances(labels, trials[:5], 0) is None
