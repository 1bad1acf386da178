"""Which GEMMs an arm has in FP4 and by which stabiliser: steps of one GEMM, the matrix, published figures.

Steps and matrices are found by comparing resolved configurations, not names. The verdict on which GEMM adds
most uses the steps: a comparison with the baseline alone mixes the GEMMs. An arm without a configuration
(none of its runs has started) is in neither.

An arm is matched to published figures by what the sources name (format, GEMMs in FP4, rounding, Hadamard);
model, data, scale rule and baseline differ, and each row names the source's. Loss differences are those of
the final validation loss in nats per token against the source's own baseline.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ablate.recipes import GEMMS, PRESETS, Gemm, Recipe

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from ablate.results.cost import Cost
    from ablate.store.records import RecordedConfig

Gemms = tuple[Gemm, ...]
PLAIN = "none"
_OF_THE_STABILISER = (
    "rounding",
    "prescale",
    "undo",
    "hadamard",
    "signs",
    "permute",
    "rotated_bf16",
)
_SIDES = ("left", "right")
_STOCHASTIC = {
    "stochastic_rocm": "SR(rocm)",
    "stochastic_8bit": "SR8",
    "stochastic": "SR",
}


class RecipeKind(NamedTuple):
    """A recipe as papers name it.

    ``stabiliser``: ``none``, or ``SR`` (``SR(rocm)``) and ``RHT16`` or ``DHT16``, with the transform's size,
    joined by ``+``, each with ``*`` if only some of the FP4 operands have it.
    """

    format: str
    gemms: Gemms
    stabiliser: str


@dataclass(frozen=True)
class Published:
    """A figure as its source gives it, and the source's setting."""

    figure: str
    setting: str


@dataclass(frozen=True, kw_only=True)
class Step:
    """Putting ``gemm`` into FP4, all else equal: from one arm to another, and what it costs in tokens."""

    gemm: str
    from_arm: str
    to_arm: str
    cost: Cost


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """``arms``: a row for each of ``gemms``, a column for each of ``stabilisers``; None in an empty cell.

    ``format``: that of the FP4 GEMMs.
    """

    format: str
    gemms: tuple[Gemms, ...]
    stabilisers: tuple[str, ...]
    arms: tuple[tuple[str | None, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The arms that have a cell, row by row."""
        return tuple(arm for row in self.arms for arm in row if arm is not None)


def kind_of(recipe: Recipe) -> RecipeKind | None:
    """Classify a recipe as papers do.

    None without an FP4 GEMM, with FP4 GEMMs of several formats, and with de-oscillation, which no figure here
    has.
    """
    gemms = tuple(gemm for gemm in GEMMS if _is_fp4(recipe, gemm))
    operands = [policy for gemm, _, policy in recipe.operands() if gemm in gemms]
    formats = {operand.format for operand in operands}
    if len(formats) != 1 or recipe.deoscillate is not None:
        return None
    kinds = [operand.rounding for operand in operands if operand.is_stochastic]
    rotated = [operand for operand in operands if operand.hadamard]
    parts = []
    if kinds:
        name = next(name for kind, name in _STOCHASTIC.items() if kind in kinds)
        parts.append(name if len(kinds) == len(operands) else f"{name}*")
    if rotated:
        name = "DHT" if all(operand.signs == "none" for operand in rotated) else "RHT"
        name += str(max(operand.hadamard for operand in rotated))
        parts.append(name if len(rotated) == len(operands) else f"{name}*")
    return RecipeKind(formats.pop(), gemms, "+".join(parts) or PLAIN)


def _is_fp4(recipe: Recipe, gemm: Gemm) -> bool:
    policy = recipe.gemm(gemm)
    return "fp4" in policy.left.format and "fp4" in policy.right.format


def _recipe_of(config: RecordedConfig) -> Recipe | None:
    """Return the recipe; None if imported logs do not tell it."""
    try:
        return Recipe(**config.recipe) if config.recipe else None
    except (TypeError, ValueError):
        return None


_AMD = (
    "Llama 3.1 8B, C4, against FP8, MI355X; seeds not given (arXiv 2605.09825, table 1)"
)
_TSENG = "GPT on Wikipedia, against BF16; one run (Tseng et al., arXiv 2502.20586)"
_NVIDIA = "12B hybrid, 10T tokens, against FP8; one run (NVIDIA, arXiv 2509.25149)"
_MLPERF = (
    "Llama 3.1 8B, MLPerf Training v5.1, batch 16, against FP8; 110 and 30 runs (public logs, ± one "
    "standard error)"
)
_PLAIN_BACKWARD = RecipeKind("mxfp4", GEMMS[1:], PLAIN)
_PUBLISHED = (
    (
        "amd-f amd-f-sr amd-f-rht16 amd-fdw-dht16 amd-fdw-dht32",
        "8–9 % more tokens",
        _AMD,
    ),
    ("amd-fd amd-fd-sr amd-fd-rht16", "10–11 % more tokens", _AMD),
    ("amd-fdw", "26–27 % more tokens", _AMD),
    ("amd-fdw-sr amd-fdw-rht16", "does not converge", _AMD),
    ("", "+0.11 nats (345M)", _TSENG),
    ("tseng-rht", "+0.02 nats (345M)", _TSENG),
    ("tseng", "+0.02 nats (345M), 0.00 (1.3B), 0.00 (6.7B)", _TSENG),
    (
        "nvidia-nvfp4",
        "relative loss error under 1 %, about 1.5 % in the decay",
        _NVIDIA,
    ),
    ("nvidia-nvfp4", "9.0 % ± 0.6 more tokens", _MLPERF),
)
"""The presets of a figure (none: ``_PLAIN_BACKWARD``), the figure, and the source's setting."""


def published_for(recipe: Recipe) -> tuple[Published, ...]:
    """Return the published figures for recipes of the same kind; empty without any."""
    kind = kind_of(recipe)
    published = []
    for presets, figure, setting in _PUBLISHED:
        kinds = [kind_of(PRESETS[name].recipe) for name in presets.split()]
        if kind in (kinds or [_PLAIN_BACKWARD]):
            published.append(Published(figure, setting))
    return tuple(published)


def find_steps(
    configs: Mapping[str, RecordedConfig], cost: Callable[[str, str], Cost]
) -> tuple[Step, ...]:
    """Find every pair of arms in which the second has exactly one more GEMM in FP4, all else equal.

    ``cost``: returns the token cost of its second arm over its first.
    """
    recipes = {}
    settings = {}
    for arm, config in configs.items():
        recipe = _recipe_of(config)
        if recipe is not None:
            recipes[arm] = recipe
            settings[arm] = config.whole | {"recipe": None, "seed": None}
    steps = []
    for first, second in itertools.permutations(recipes, 2):
        gemm = _gained_gemm(recipes[first], recipes[second])
        if gemm is not None and settings[first] == settings[second]:
            steps.append(
                Step(
                    gemm=gemm,
                    from_arm=first,
                    to_arm=second,
                    cost=cost(first, second),
                )
            )
    return tuple(steps)


def _gained_gemm(first: Recipe, second: Recipe) -> Gemm | None:
    """Return the GEMM that alone differs, and that only the second recipe has in FP4; None without one."""
    changed = [
        part.name
        for part in fields(Recipe)
        if getattr(first, part.name) != getattr(second, part.name)
    ]
    for gemm in GEMMS:
        if changed == [gemm] and _is_fp4(second, gemm) and not _is_fp4(first, gemm):
            return gemm
    return None


def greatest_step(steps: Sequence[Step]) -> str | None:
    """Find the GEMM whose steps all have intervals above those of the other GEMMs; None without one."""
    gemms = {step.gemm for step in steps}
    if len(gemms) < 2 or any(step.cost.kind != "interval" for step in steps):
        return None
    for gemm in sorted(gemms):
        lowest = math.inf
        highest = -math.inf
        for step in steps:
            if step.gemm == gemm:
                lowest = min(lowest, step.cost.low or 0.0)
            else:
                highest = max(highest, step.cost.high or 0.0)
        if lowest > highest:
            return gemm
    return None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One arm's place in a matrix, and the rest of its configuration.

    ``settings``: without the GEMMs, as text. ``policies``: without the stabiliser, by GEMM and whether it is
    in FP4.
    """

    arm: str
    recipe: Recipe
    format: str
    gemms: Gemms
    stabiliser: str
    settings: str
    policies: dict[tuple[Gemm, bool], Any]

    def is_alike(self, other: Cell) -> bool:
        """Whether the two arms differ at most in rounding and rotation."""
        return (
            self.settings == other.settings
            and self.gemms == other.gemms
            and self.policies == other.policies
            and self.recipe.deoscillate == other.recipe.deoscillate
        )

    def fits(self, other: Cell) -> bool:
        """Whether the two arms differ only in the GEMMs that they have in FP4 and in the stabiliser."""
        return (
            self.settings == other.settings
            and (self.gemms, self.stabiliser) != (other.gemms, other.stabiliser)
            and all(
                other.policies.get(key, policy) == policy
                for key, policy in self.policies.items()
            )
        )


def find_cells(
    configs: Mapping[str, RecordedConfig], *, free: Collection[str] = ()
) -> dict[str, Cell]:
    """Return the cell of each arm that has one.

    ``configs``: of the arms, in the study's order. ``free``: training fields in which arms may differ,
    because each arm has its own tuned values.
    """
    cells = {}
    for arm, config in configs.items():
        cell = _cell_of(arm, config, free)
        if cell is not None:
            cells[arm] = cell
    return cells


def find_matrices(cells: Mapping[str, Cell]) -> tuple[Matrix, ...]:
    """Find the matrices of at least 2 × 2 with an arm in more than half of their cells."""
    grids: list[list[Cell]] = []
    for cell in cells.values():
        for grid in grids:
            if all(cell.fits(other) for other in grid):
                grid.append(cell)
                break
        else:
            grids.append([cell])
    return tuple(filter(None, map(_matrix_of, grids)))


def _matrix_of(cells: Sequence[Cell]) -> Matrix | None:
    """Return the matrix of these cells; None if it is smaller than 2 × 2 or more than half empty."""
    arms = {(cell.gemms, cell.stabiliser): cell.arm for cell in cells}
    rows, columns = (dict.fromkeys(side) for side in zip(*arms, strict=True))
    gemms = sorted(rows, key=lambda row: (len(row), *map(GEMMS.index, row)))
    stabilisers = sorted(columns, key=lambda column: column != PLAIN)
    num_cells = len(gemms) * len(stabilisers)
    if min(len(gemms), len(stabilisers)) < 2 or 2 * len(arms) <= num_cells:
        return None
    return Matrix(
        format=cells[0].format,
        gemms=tuple(gemms),
        stabilisers=tuple(stabilisers),
        arms=tuple(
            tuple(arms.get((row, column)) for column in stabilisers) for row in gemms
        ),
    )


def _cell_of(arm: str, config: RecordedConfig, free: Collection[str]) -> Cell | None:
    """Return an arm's cell; None if its recipe is not known, or has no place in a matrix."""
    recipe = _recipe_of(config)
    if recipe is None:
        return None
    kind = kind_of(replace(recipe, deoscillate=None))
    if kind is None:
        return None
    stabiliser = kind.stabiliser
    if recipe.deoscillate is not None:
        if stabiliser == PLAIN:
            stabiliser = "de-oscillation"
        else:
            stabiliser = f"{stabiliser}+de-oscillation"
    rest = asdict(recipe)
    del rest["deoscillate"]
    policies = {}
    for gemm in GEMMS:
        policy = rest.pop(gemm)
        is_fp4 = gemm in kind.gemms
        if is_fp4:
            for side, key in itertools.product(_SIDES, _OF_THE_STABILISER):
                del policy[side][key]
        policies[gemm, is_fp4] = policy
    # What each arm was tuned in is no difference between them.
    training = (config.training or {}) | dict.fromkeys(free)
    settings = config.whole | {"training": training, "recipe": rest, "seed": None}
    return Cell(
        arm=arm,
        recipe=recipe,
        format=kind.format,
        gemms=kind.gemms,
        stabiliser=stabiliser,
        settings=json.dumps(settings, sort_keys=True, default=str),
        policies=policies,
    )
