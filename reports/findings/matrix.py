"""The arms as a matrix: which GEMMs are in FP4, by which stabiliser, where all else is alike.

Found by comparing resolved configurations, not names, as steps between arms are.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ablate.recipes import GEMMS, Recipe
from ablate.reports.findings.published import kind_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ablate.recipes import Gemm, GemmPolicy
    from ablate.reports.findings.published import RecipeKind
    from ablate.store.records import RecordedConfig

PLAIN = "none"
_OF_THE_STABILISER = ("rounding", "prescale", "undo", "hadamard", "signs", "permute", "rotated_bf16")


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """``arms``: a row for each of ``gemms``, a column for each of ``stabilisers``; None where there is none.

    ``format``: that of the FP4 GEMMs.
    """

    format: str
    gemms: tuple[tuple[Gemm, ...], ...]
    stabilisers: tuple[str, ...]
    arms: tuple[tuple[str | None, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The arms that have a cell, row by row."""
        return tuple(arm for row in self.arms for arm in row if arm is not None)


def find_matrices(configs: Mapping[str, RecordedConfig], *, free: Collection[str] = ()) -> tuple[Matrix, ...]:
    """Return the matrices of at least 2 × 2 with an arm in more than half of their cells.

    ``configs``: of the arms, in the study's order. ``free``: fields of training in which arms may differ,
    because each arm has values of its own.
    """
    groups: list[_Group] = []
    for arm, config in configs.items():
        cell = _cell(config, free)
        if cell is None:
            continue
        group = next((one for one in groups if one.takes(cell)), None)
        if group is None:
            group = _Group(rest=cell.rest)
            groups.append(group)
        group.policies |= cell.policies
        group.arms[cell.place] = arm
        group.format = cell.format
    found = (group.matrix() for group in groups)
    return tuple(
        one
        for one in found
        if len(one.gemms) > 1
        and len(one.stabilisers) > 1
        and 2 * len(one.names) > len(one.gemms) * len(one.stabilisers)
    )


@dataclass(frozen=True, kw_only=True)
class _Cell:
    """One arm: its place, what its GEMMs are besides the stabiliser, and the ``rest`` of what it is."""

    format: str
    place: tuple[tuple[Gemm, ...], str]
    policies: dict[tuple[Gemm, bool], Any]
    rest: str


@dataclass(kw_only=True)
class _Group:
    rest: str
    format: str = ""
    policies: dict[tuple[Gemm, bool], Any] = field(default_factory=dict)
    arms: dict[tuple[tuple[Gemm, ...], str], str] = field(default_factory=dict)

    def takes(self, cell: _Cell) -> bool:
        """Tell whether an arm differs from these in its GEMMs and its stabiliser alone."""
        return (
            self.rest == cell.rest
            and cell.place not in self.arms
            and all(self.policies.get(key, policy) == policy for key, policy in cell.policies.items())
        )

    def matrix(self) -> Matrix:
        gemms = sorted({row for row, _ in self.arms}, key=lambda row: (len(row), *map(GEMMS.index, row)))
        stabilisers = sorted(dict.fromkeys(column for _, column in self.arms), key=lambda name: name != PLAIN)
        return Matrix(
            format=self.format,
            gemms=tuple(gemms),
            stabilisers=tuple(stabilisers),
            arms=tuple(tuple(self.arms.get((row, column)) for column in stabilisers) for row in gemms),
        )


def _cell(config: RecordedConfig, free: Collection[str]) -> _Cell | None:
    try:
        recipe = Recipe(**config.recipe or {})
    except (TypeError, ValueError):  # of logs that others wrote
        return None
    kind = kind_of(replace(recipe, deoscillate=None))
    if kind is None:
        return None
    training = {key: value for key, value in (config.training or {}).items() if key not in free}
    beside = {key: one for key, one in asdict(recipe).items() if key not in (*GEMMS, "deoscillate")}
    rest = {**config.whole, "training": training, "recipe": beside, "seed": None}
    return _Cell(
        format=kind.format,
        place=(kind.gemms, _stabiliser(kind, recipe)),
        policies={
            (gemm, gemm in kind.gemms): _beside_stabiliser(recipe.gemm(gemm), low=gemm in kind.gemms)
            for gemm in GEMMS
        },
        rest=json.dumps(rest, sort_keys=True, default=str),
    )


def _beside_stabiliser(policy: GemmPolicy, *, low: bool) -> dict[str, Any]:
    whole = asdict(policy)
    if low:
        for side in ("left", "right"):
            whole[side] = {key: one for key, one in whole[side].items() if key not in _OF_THE_STABILISER}
    return whole


def _stabiliser(kind: RecipeKind, recipe: Recipe) -> str:
    """Return the stabiliser in a word or two, e.g. ``SR+RHT16``; ``none`` without one."""
    names = {"sr": "SR", "rht": f"RHT{kind.hadamard}", "dht": f"DHT{kind.hadamard}"}
    words = [] if kind.stabiliser == PLAIN else kind.stabiliser.split("+")
    parts = [re.sub("^(sr|rht|dht)", lambda match: names[match[0]], word) for word in words]
    if recipe.deoscillate is not None:
        parts.append("de-oscillation")
    return "+".join(parts) or PLAIN
