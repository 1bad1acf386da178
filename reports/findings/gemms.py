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
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ablate.recipes import GEMMS, PRESETS, Gemm, Recipe

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from ablate.results.cost import Cost
    from ablate.store.records import RecordedConfig

    Place = tuple[tuple[Gemm, ...], str]

PLAIN = "none"
_OF_THE_STABILISER = ("rounding", "prescale", "undo", "hadamard", "signs", "permute", "rotated_bf16")
_SIDES = ("left", "right")


class RecipeKind(NamedTuple):
    """A recipe as papers name it.

    ``stabiliser``: ``none``, or ``SR`` (``SR(rocm)``) and ``RHT16`` or ``DHT16``, with the transform's size,
    joined by ``+``, each with ``*`` if only some of the FP4 operands have it.
    """

    format: str
    gemms: tuple[Gemm, ...]
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
    gemms: tuple[tuple[Gemm, ...], ...]
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
    sides = {gemm: [getattr(recipe.gemm(gemm), side) for side in _SIDES] for gemm in GEMMS}
    low = tuple(gemm for gemm in GEMMS if all("fp4" in side.format for side in sides[gemm]))
    operands = [side for gemm in low for side in sides[gemm]]
    formats = {side.format for side in operands}
    if len(formats) != 1 or recipe.deoscillate is not None:
        return None
    rotated = [side for side in operands if side.hadamard]
    drawn = [side for side in operands if side.is_stochastic]
    words = []
    if drawn:
        kinds = {side.rounding.removeprefix("stochastic") for side in drawn}
        word = "SR(rocm)" if "_rocm" in kinds else "SR8" if "_8bit" in kinds else "SR"
        words.append(word + "*" * (len(drawn) < len(operands)))
    if rotated:
        name = "DHT" if all(side.signs == "none" for side in rotated) else "RHT"
        size = max(side.hadamard for side in rotated)
        words.append(f"{name}{size}" + "*" * (len(rotated) < len(operands)))
    return RecipeKind(formats.pop(), low, "+".join(words) or PLAIN)


_AMD = "Llama 3.1 8B, C4, against FP8, MI355X; seeds not given (arXiv 2605.09825, table 1)"
_TSENG = "GPT on Wikipedia, against BF16; one run (Tseng et al., arXiv 2502.20586)"
_NVIDIA = "12B hybrid, 10T tokens, against FP8; one run (NVIDIA, arXiv 2509.25149)"
_MLPERF = (
    "Llama 3.1 8B, MLPerf Training v5.1, batch 16, against FP8; 110 and 30 runs (public logs, ± one "
    "standard error)"
)
_PLAIN_BACKWARD = RecipeKind("mxfp4", GEMMS[1:], PLAIN)
_PUBLISHED = (
    ("amd-f amd-f-sr amd-f-rht16 amd-fdw-dht16 amd-fdw-dht32", "8–9 % more tokens", _AMD),
    ("amd-fd amd-fd-sr amd-fd-rht16", "10–11 % more tokens", _AMD),
    ("amd-fdw", "26–27 % more tokens", _AMD),
    ("amd-fdw-sr amd-fdw-rht16", "does not converge", _AMD),
    ("", "+0.11 nats (345M)", _TSENG),
    ("tseng-rht", "+0.02 nats (345M)", _TSENG),
    ("tseng", "+0.02 nats (345M), 0.00 (1.3B), 0.00 (6.7B)", _TSENG),
    ("nvidia-nvfp4", "relative loss error under 1 %, about 1.5 % in the decay", _NVIDIA),
    ("nvidia-nvfp4", "9.0 % ± 0.6 more tokens", _MLPERF),
)
"""The presets of a figure (none: ``_PLAIN_BACKWARD``), the figure, and the source's setting."""


def published_for(recipe: Recipe) -> tuple[Published, ...]:
    """Return the published figures for recipes of the same kind; empty without any."""
    own = kind_of(recipe)
    return tuple(
        Published(figure, setting)
        for presets, figure, setting in _PUBLISHED
        if own in ([kind_of(PRESETS[name].recipe) for name in presets.split()] or [_PLAIN_BACKWARD])
    )


def find_steps(configs: Mapping[str, RecordedConfig], cost: Callable[[str, str], Cost]) -> tuple[Step, ...]:
    """Find every pair of arms in which the second has exactly one more GEMM in FP4, all else equal.

    ``cost``: returns the token cost of its second arm over its first.
    """
    usable = {
        arm: (config.recipe, {**config.whole, "recipe": None, "seed": None})
        for arm, config in configs.items()
        if config.recipe is not None and all(gemm in config.recipe for gemm in GEMMS)
    }
    found = []
    for (first, (recipe, rest)), (second, (other, other_rest)) in itertools.permutations(usable.items(), 2):
        # An empty rule, phase or other part of a recipe is equal to a missing one.
        changed = [
            key for key in {**recipe, **other} if (recipe.get(key) or None) != (other.get(key) or None)
        ]
        if rest == other_rest and len(changed) == 1 and changed[0] in GEMMS:
            (gemm,) = changed
            was_fp4, is_fp4 = (
                all("fp4" in str(policy.get(side, {}).get("format", "")) for side in _SIDES)
                for policy in (recipe[gemm], other[gemm])
            )
            if is_fp4 and not was_fp4:
                found.append(Step(gemm=gemm, from_arm=first, to_arm=second, cost=cost(first, second)))
    return tuple(found)


def greatest_step(steps: Sequence[Step]) -> str | None:
    """Find the GEMM whose steps all have intervals above those of the other GEMMs; None without one."""
    gemms = {step.gemm for step in steps}
    if len(gemms) < 2 or any(step.cost.kind != "interval" for step in steps):
        return None
    for gemm in sorted(gemms):
        lows = [step.cost.low for step in steps if step.gemm == gemm and step.cost.low is not None]
        highs = [step.cost.high for step in steps if step.gemm != gemm and step.cost.high is not None]
        if min(lows) > max(highs):
            return gemm
    return None


def find_matrices(configs: Mapping[str, RecordedConfig], *, free: Collection[str] = ()) -> tuple[Matrix, ...]:
    """Find the matrices of at least 2 × 2 with an arm in more than half of their cells.

    ``configs``: of the arms, in the study's order. ``free``: training fields in which arms may differ,
    because each arm has its own tuned values.
    """
    # Of each group: the format; the configuration without GEMMs; the policies without stabiliser, by GEMM and
    # whether it is in FP4; and the arms by (GEMMs, stabiliser).
    groups: list[tuple[str, str, dict[Any, Any], dict[Place, str]]] = []
    for arm, config in configs.items():
        try:
            recipe = Recipe(**config.recipe or {})
        except (TypeError, ValueError):  # imported logs
            continue
        kind = kind_of(replace(recipe, deoscillate=None))
        if kind is None:
            continue
        stabiliser = kind.stabiliser
        if recipe.deoscillate is not None:
            stabiliser = "de-oscillation" if stabiliser == PLAIN else f"{stabiliser}+de-oscillation"
        place = (kind.gemms, stabiliser)
        parts = asdict(recipe)
        policies = {(gemm, gemm in kind.gemms): parts.pop(gemm) for gemm in GEMMS}
        for (_, low), policy in policies.items():
            for side in _SIDES if low else ():
                policy[side] = {
                    key: one for key, one in policy[side].items() if key not in _OF_THE_STABILISER
                }
        del parts["deoscillate"]
        training = {key: value for key, value in (config.training or {}).items() if key not in free}
        whole = {**config.whole, "training": training, "recipe": parts, "seed": None}
        rest = json.dumps(whole, sort_keys=True, default=str)
        for _, other, known, arms in groups:
            same = all(known.get(key, policy) == policy for key, policy in policies.items())
            if same and other == rest and place not in arms:
                break
        else:
            known, arms = {}, {}
            groups.append((kind.format, rest, known, arms))
        known |= policies
        arms[place] = arm
    found = []
    for low_format, _, _, arms in groups:
        gemms = sorted({row for row, _ in arms}, key=lambda row: (len(row), *map(GEMMS.index, row)))
        columns = sorted(dict.fromkeys(column for _, column in arms), key=lambda name: name != PLAIN)
        if min(len(gemms), len(columns)) > 1 and 2 * len(arms) > len(gemms) * len(columns):
            cells = tuple(tuple(arms.get((row, column)) for column in columns) for row in gemms)
            found.append(
                Matrix(format=low_format, gemms=tuple(gemms), stabilisers=tuple(columns), arms=cells)
            )
    return tuple(found)
