"""``search:`` in a study file: what it makes of the grid."""

from __future__ import annotations

from ablate.study.search_space import SearchCell

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
