"""``search:`` in a study file: what it makes of the grid, and the lines for what it may not say."""

from __future__ import annotations

import pytest

from ablate.study.search_section import SearchCell

HEAD = "name: s\nbaseline: bf16\ntarget: {val_loss: 2.0}\n"
SEARCH = "search: {hardware: B200, trials: 4, budgets: [60_000, 90_000]}\n"
BASE = "base: {model: {ffn: 384}}\n"
ARMS = """\
arms:
  bf16: {recipe: bf16}
  tseng: {recipe: tseng}
"""
GRID = """\
grid:
  senseless: drop
  factors:
    recipe.gemms: {none: [], F: [fprop]}
    recipe.stabiliser: [none, sr]
base: {model: {ffn: 384}}
"""


def test_a_grid_becomes_cells_with_their_arms(study):
    loaded = study(HEAD + SEARCH + ARMS + GRID)
    search = loaded.search
    assert search.factors == {"recipe.gemms": ("none", "F"), "recipe.stabiliser": ("none", "sr")}
    assert search.cells == (
        SearchCell(levels={"recipe.gemms": "none", "recipe.stabiliser": "none"}, arm="bf16"),
        SearchCell(levels={"recipe.gemms": "F", "recipe.stabiliser": "none"}, arm="F none"),
        SearchCell(levels={"recipe.gemms": "F", "recipe.stabiliser": "sr"}, arm="F sr"),
    )
    assert search.named == ("bf16", "tseng")
    assert (search.budgets, search.objective, search.keep, search.at_once) == (
        (60_000, 90_000),
        "loss",
        0.33,
        4,
    )
    assert loaded.seeds == (1000,)
    assert loaded.training.tokens == 60_000


def test_a_study_has_no_search(study):
    assert study(HEAD + ARMS + "base: {model: {ffn: 384}}\n").search is None


CASES = {
    "what belongs to a study": (
        f"{SEARCH}{ARMS}base: {{model: {{ffn: 384}}}}\nseeds: 3\npaired_seeds: true\ndiagnostics: {{}}\n",
        [
            "9:1: seeds: a search has no 'seeds' (search.seed is the seed of its runs)",
            "10:1: paired_seeds: a search has no 'paired_seeds' (it belongs to a study)",
            "11:1: diagnostics: a search has no 'diagnostics' (it belongs to a study)",
        ],
    ),
    "a token budget": (
        f"{SEARCH}{ARMS}base: {{model: {{ffn: 384}}, training: {{tokens: 70_000}}}}\n",
        ["8:38: base.training.tokens: a search has no token budget here (search.budgets says it)"],
    ),
    "an arm that is more than a recipe": (
        f"{SEARCH}{ARMS}  wide: {{recipe: fp8, model: {{width: 256}}}}\n{BASE}",
        [
            (
                "8:23: arms.wide.model: a search compares recipes: 'wide' must not set model "
                "(set it in base, for all of them)"
            )
        ],
    ),
    "a factor that is no part of a recipe": (
        f"{SEARCH}{ARMS}base: {{model: {{ffn: 384}}}}\ngrid: {{factors: {{training.beta1: [0.9, 0.8]}}}}\n",
        ["9:18: grid.factors.training.beta1: a search compares recipes: 'training.beta1' is no part of one"],
    ),
    "budgets that fall": (
        f"search: {{hardware: B200, trials: 4, budgets: [90_000, 60_000]}}\n{ARMS}{BASE}",
        ["4:55: search.budgets[1]: a budget of 60_000 after one of 90_000 (budgets rise)"],
    ),
    "hardware of no known name": (
        f"search: {{hardware: b200, trials: 4, budgets: [90_000]}}\n{ARMS}{BASE}",
        [
            (
                "4:20: search.hardware: expected H100, H200, GB200, GB300, B200, B300, MI350X or MI355X, "
                "got 'b200' (did you mean 'B200'?)"
            )
        ],
    ),
    "no budget": (
        f"search: {{hardware: B200, trials: 4, budgets: []}}\n{ARMS}{BASE}",
        ["4:46: search.budgets: expected at least one entry"],
    ),
    "a first budget that is too small for the base": (
        f"search: {{hardware: B200, trials: 4, budgets: [40_000]}}\n{ARMS}{BASE}",
        None,
    ),
    "a share of nothing, and no trials": (
        f"search: {{hardware: B200, budgets: [90_000], keep: 0.0}}\n{ARMS}{BASE}",
        [
            "4:9: search: missing key 'trials'",
            "4:51: search.keep: expected a number above 0, got 0.0",
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_lines_for_what_is_wrong(problems, case):
    text, lines = CASES[case]
    found = problems(HEAD + text)
    if lines is None:
        assert any("eval_every_tokens 50000 exceeds the budget of 40000 tokens" in line for line in found)
    else:
        assert found == lines


def test_a_phase_must_begin_within_the_first_budget(problems):
    arm = "  late: {recipe: {phases: [{from_tokens: 70_000, recipe: fp8}]}}\n"
    (line,) = problems(HEAD + SEARCH + ARMS + arm + "base: {model: {ffn: 384}}\n")
    assert "a phase from token 70000 on, but the budget is 60000 tokens" in line
