"""What others have published for recipes like an arm's, shown beside our own figure.

An arm is matched by what the sources name (format, GEMMs in FP4, rounding, Hadamard); model, data, scale rule
and baseline differ, and each row names the source's. Loss differences are of the final validation loss in
nats per token against the source's own baseline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ablate.recipes import GEMMS

if TYPE_CHECKING:
    from ablate.recipes import Gemm, OperandPolicy, Recipe

_AMD = "Llama 3.1 8B, C4, against FP8, MI355X; seeds not given (arXiv 2605.09825, table 1)"
_TSENG = "GPT on Wikipedia, against BF16; one run (Tseng et al., arXiv 2502.20586)"
_NVIDIA = "12B hybrid, 10T tokens, against FP8; one run (NVIDIA, arXiv 2509.25149)"
_MLPERF = (
    "Llama 3.1 8B, MLPerf Training v5.1, batch 16, against FP8; 110 and 30 runs (public logs, ± one "
    "standard error)"
)


@dataclass(frozen=True, kw_only=True)
class Published:
    """One figure as its source gives it, and the source's setting."""

    figure: str
    setting: str


@dataclass(frozen=True, kw_only=True)
class RecipeKind:
    """What a recipe is as papers name it.

    ``stabiliser``: ``none``, or ``sr`` (``sr(rocm)``), ``rht`` and ``dht`` with ``+`` between them, each with
    ``*`` where only a part of the FP4 operands has it.
    """

    format: str
    gemms: tuple[Gemm, ...]
    stabiliser: str
    hadamard: int


def kind_of(recipe: Recipe) -> RecipeKind | None:
    """Return what a recipe is as papers name it.

    None without an FP4 GEMM, where its GEMMs differ, and with de-oscillation, which no figure here has.
    """
    low = tuple(gemm for gemm in GEMMS if all("fp4" in side.format for side in _sides(recipe, gemm)))
    operands = [side for gemm in low for side in _sides(recipe, gemm)]
    formats = {side.format for side in operands}
    if len(formats) != 1 or recipe.deoscillate is not None:
        return None
    rotated = [side for side in operands if side.hadamard]
    drawn = [side for side in operands if side.is_stochastic]
    words = []
    if drawn:
        rocm = any(side.rounding == "stochastic_rocm" for side in drawn)
        words.append(("sr(rocm)" if rocm else "sr") + "*" * (len(drawn) < len(operands)))
    if rotated:
        name = "dht" if all(side.signs == "none" for side in rotated) else "rht"
        words.append(name + "*" * (len(rotated) < len(operands)))
    return RecipeKind(
        format=formats.pop(),
        gemms=low,
        stabiliser="+".join(words) or "none",
        hadamard=max((side.hadamard for side in rotated), default=0),
    )


def _sides(recipe: Recipe, gemm: Gemm) -> tuple[OperandPolicy, OperandPolicy]:
    policy = recipe.gemm(gemm)
    return policy.left, policy.right


def _of(gemms: tuple[Gemm, ...], stabiliser: str, hadamard: int = 0) -> RecipeKind:
    return RecipeKind(format="mxfp4", gemms=gemms, stabiliser=stabiliser, hadamard=hadamard)


_F, _FD, _DW = GEMMS[:1], GEMMS[:2], GEMMS[1:]
_FEW, _MORE = "8–9 % more tokens", "10–11 % more tokens"
_FIGURES: dict[RecipeKind, tuple[Published, ...]] = {
    _of(_F, "none"): (Published(figure=_FEW, setting=_AMD),),
    _of(_FD, "none"): (Published(figure=_MORE, setting=_AMD),),
    _of(GEMMS, "none"): (Published(figure="26–27 % more tokens", setting=_AMD),),
    _of(_F, "sr"): (Published(figure=_FEW, setting=_AMD),),
    _of(_FD, "sr"): (Published(figure=_MORE, setting=_AMD),),
    _of(GEMMS, "sr"): (Published(figure="does not converge", setting=_AMD),),
    _of(_F, "rht", 16): (Published(figure=_FEW, setting=_AMD),),
    _of(_FD, "rht", 16): (Published(figure=_MORE, setting=_AMD),),
    _of(GEMMS, "rht", 16): (Published(figure="does not converge", setting=_AMD),),
    _of(GEMMS, "dht", 16): (Published(figure=_FEW, setting=_AMD),),
    _of(GEMMS, "dht", 32): (Published(figure=_FEW, setting=_AMD),),
    _of(_DW, "none"): (Published(figure="+0.11 nats (345M)", setting=_TSENG),),
    _of(_DW, "rht", 64): (Published(figure="+0.02 nats (345M)", setting=_TSENG),),
    _of(_DW, "sr+rht", 64): (
        Published(figure="+0.02 nats (345M), 0.00 (1.3B), 0.00 (6.7B)", setting=_TSENG),
    ),
    RecipeKind(format="nvfp4", gemms=GEMMS, stabiliser="sr*+rht*", hadamard=16): (
        Published(figure="relative loss error under 1 %, about 1.5 % in the decay", setting=_NVIDIA),
        Published(figure="9.0 % ± 0.6 more tokens", setting=_MLPERF),
    ),
}


def published_for(recipe: Recipe) -> tuple[Published, ...]:
    """Return what others have published for recipes of this kind."""
    kind = kind_of(recipe)
    return () if kind is None else _FIGURES.get(kind, ())
