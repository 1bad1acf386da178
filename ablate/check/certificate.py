"""``ablate check RECIPE``: whether a quantiser is what it claims to be, and what it does on average.

1. Bits: on made-up tensors and on corner cases the subject is held against plain torch, and each difference
   gets a cause. Codes and scales must be the same; the sign of zero and a last bit of the output may differ.
2. Figures of each operand on four kinds of data, with standard errors over tensors. For a function they must
   be the definition's within 5 standard errors.
3. Figures of each GEMM's product, for a recipe.

How it fails: ``UserError``, from ``claims``; undefined figures are None.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from ablate.backends.select import Selection
from ablate.backends.testing.inputs import KINDS, corners, made_up
from ablate.backends.testing.suite import one_thread
from ablate.check.claims import Claim, ClaimedOperand, without_rotation
from ablate.check.differences import CAUSES, HARMLESS, Cause, Definition, Differences, compare, in_words
from ablate.check.figures import BOUND, Estimate, RoundingFigures, Sums, ratios
from ablate.diagnose.measure import ratio
from ablate.diagnose.recorder import Tapped, diagnose_product
from ablate.layers.linear import QuantLinear
from ablate.layers.state import Position, RecipeState
from ablate.numerics.quantiser import on_grid, round_operand
from ablate.numerics.rotate import rotate
from ablate.recipes import GEMMS, block_shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ablate.numerics.philox import Key
    from ablate.recipes import Gemm, Recipe

SIDE = 512
"""Rows and columns of a tensor whose rounding is measured."""
PRODUCT_SIDE = 256
"""M, N and K of the products."""
COMPARED = 2
"""Tensors of each kind that are held against the definition bit by bit."""


class Corner(NamedTuple):
    """A corner case in words: what the subject does, and what the definition says."""

    name: str
    found: str
    expected: str


@dataclass(frozen=True, kw_only=True)
class OperandCertificate:
    """One operand, or several that nothing tells apart. ``definition``: its figures, for a function alone.

    ``clipped`` and ``zeroed``: shares of elements by kind of data.
    """

    operand: ClaimedOperand
    figures: dict[str, RoundingFigures]
    definition: dict[str, RoundingFigures]
    clipped: dict[str, float | None]
    zeroed: dict[str, float | None]
    corners: tuple[Corner, ...]
    compared: int
    differences: tuple[Differences, ...]

    @property
    def disagreements(self) -> tuple[str, ...]:
        """The figures of a function that are not the definition's, each with the kinds of data."""
        found: dict[str, list[str]] = {}
        for kind, theirs in self.definition.items():
            ours = self.figures[kind]
            positions = zip(ours.by_position, theirs.by_position, strict=True)
            agrees = {
                name.replace("_", " "): getattr(ours, name).agrees_with(getattr(theirs, name))
                for name in ("gain", "relative_error", "bias_share")
            }
            agrees["gain by position"] = all(one.agrees_with(other) for one, other in positions)
            agrees["independence of the noise"] = (
                ours.largest_alike is None or theirs.largest_alike is not None
            )
            for name in (name for name, agreed in agrees.items() if not agreed):
                found.setdefault(name, []).append(kind)
        return tuple(f"{name} ({', '.join(kinds)})" for name, kinds in found.items())

    @property
    def holds(self) -> bool:
        """Whether the operand is what it claims to be."""
        return not self.disagreements and all(one.cause in HARMLESS for one in self.differences)


@dataclass(frozen=True, kw_only=True)
class ProductCertificate:
    """One GEMM's product on one kind of data, means over made-up tensors.

    ``bf16``: the bias share that rounding the output to bf16 has at most. ``unbiased``: the product's
    expectation is the exact product, within the bound and one rounding.
    """

    gemm: Gemm
    kind: str
    gain: Estimate
    relative_error: Estimate
    bias_share: Estimate
    bf16: float
    unbiased: bool


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What was found about a claim."""

    claim: Claim
    draws: int
    operands: tuple[OperandCertificate, ...]
    products: tuple[ProductCertificate, ...]

    @property
    def holds(self) -> bool:
        """Whether every operand is what it claims to be."""
        return all(one.holds for one in self.operands)


def work(claim: Claim, draws: int) -> int:
    """Return how many tensors ``certify`` measures: the length of a progress bar."""
    kinds = len(KINDS)
    products = kinds * _product_sets(draws) if claim.recipe is not None else 0
    return len(claim.operands) * kinds * draws + products


@torch.no_grad()
def certify(
    claim: Claim, *, draws: int, seed: int = 0, done: Callable[[int], None] = lambda _: None
) -> Certificate:
    """Certify a claim.

    Args:
        claim: the recipe or function.
        draws: tensors of each kind, at least 8; each is quantised twice where rounding is random.
        seed: of the made-up tensors and of the randomness.
        done: called with the number of tensors measured since the last call.

    Raises:
        UserError: a function that cannot be called.
    """
    with one_thread():
        operands = tuple(_operand(claim, operand, draws, seed, done) for operand in claim.operands)
        products: tuple[ProductCertificate, ...] = ()
        if claim.recipe is not None:
            products = tuple(_products(claim, claim.recipe, draws, seed, done))
    return Certificate(claim=claim, draws=draws, operands=operands, products=products)


def _operand(
    claim: Claim, operand: ClaimedOperand, draws: int, seed: int, done: Callable[[int], None]
) -> OperandCertificate:
    """Quantise made-up tensors of each kind, then the corner cases."""
    columns = block_shape(operand.policy)[1]
    ours, theirs = ({kind: Sums(columns) for kind in KINDS} for _ in range(2))
    clipped: dict[str, float | None] = {}
    zeroed: dict[str, float | None] = {}
    counted: dict[Cause, Differences] = {}
    compared = 0
    for kind in KINDS:
        for number in range(draws):
            stored = made_up(kind, SIDE, SIDE, seed=seed, number=number)
            keys = [operand.key(number, draw, seed) for draw in range(2)]
            drawn = keys if operand.is_random else keys[:1]
            exact = _exact(stored, operand, keys[0])
            # A function may be random where its definition is not.
            asked = drawn if claim.function is None else keys
            outputs = [claim.values(stored, operand, key) for key in asked]
            ours[kind].add(exact, outputs)
            if claim.function is not None:
                theirs[kind].add(exact, [_defined(stored, operand, key) for key in drawn])
            if number < COMPARED:
                found, definition = outputs[0], _definition(claim, stored, operand, keys[0], kind)
                grid = definition.grid
                there = grid.rotated != 0
                clips = (grid.scaled.abs() > grid.element.max) & there
                count = float(there.sum())
                clipped[kind] = ratio(float(clips.sum()), count)
                zeroed[kind] = ratio(float(((found == 0) & there).sum()), count)
                compare(found, definition, counted)
                compared += found.numel()
            done(1)
    cases = []
    policy = without_rotation(operand.policy)
    plain = ClaimedOperand(names=operand.names, policy=policy, axis=1)
    key = plain.key(0, 0, seed)
    for name, probe in corners(policy, seed=seed, rows=128).items():
        found, definition = claim.values(probe, plain, key), _definition(claim, probe, plain, key, name)
        words = (in_words(name, one, definition.grid, policy) for one in (found, definition.values))
        cases.append(Corner(name, *words))
        compare(found, definition, counted)
        compared += found.numel()
    return OperandCertificate(
        operand=operand, clipped=clipped, zeroed=zeroed, corners=tuple(cases), compared=compared,
        figures={kind: sums.figures() for kind, sums in ours.items()},
        definition={kind: sums.figures() for kind, sums in theirs.items()} if claim.function else {},
        differences=tuple(counted[cause] for cause in CAUSES if cause in counted),
    )  # fmt: skip


def _exact(stored: Tensor, operand: ClaimedOperand, key: Key) -> Tensor:
    """Return the rotated tensor, fp32 [n, k], up to the order of its sums: one product is fast."""
    last = (stored if operand.axis == 1 else stored.t()).to(torch.float32).contiguous()
    policy = operand.policy
    if not policy.hadamard:
        return last
    matrix = rotate(torch.eye(policy.hadamard), replace(policy, rotated_bf16=False), key)
    done = (last.view(-1, policy.hadamard) @ matrix).view(last.shape)
    return done.to(torch.bfloat16).to(torch.float32) if policy.rotated_bf16 else done


def _defined(stored: Tensor, operand: ClaimedOperand, key: Key) -> Tensor:
    """Return the definition's values, fp32 [n, k], contraction last and rotated."""
    done = round_operand(stored, operand.policy, axis=operand.axis, key=key)
    values = done.values.to(torch.float32) * done.descale
    return values if operand.axis == 1 else values.t().contiguous()


def _definition(claim: Claim, stored: Tensor, operand: ClaimedOperand, key: Key, data: str) -> Definition:
    return Definition(
        data=data,
        policy=operand.policy,
        values=_defined(stored, operand, key),
        grid=on_grid(stored, operand.policy, axis=operand.axis, key=key),
        # A recipe draws the words of its definition; a function has its own.
        random=operand.is_random and claim.function is not None,
    )


def _product_sets(draws: int) -> int:
    return max(draws // 2, 8)


def _products(
    claim: Claim, recipe: Recipe, draws: int, seed: int, done: Callable[[int], None]
) -> list[ProductCertificate]:
    """Measure every quantised GEMM of a recipe on made-up tensors of each kind."""
    side = PRODUCT_SIDE
    state = RecipeState(recipe=recipe, backend=Selection(claim.backend), seed=seed)
    layer = QuantLinear(side, side, name="blocks.0.certified", state=state)
    found = []
    gemms = [gemm for gemm in GEMMS if not recipe.gemm(gemm).is_untouched]
    for kind in KINDS:
        sums: dict[Gemm, list[tuple[Tensor, Tensor]]] = {gemm: [] for gemm in gemms}
        for number in range(_product_sets(draws)):
            dy, x, w = (
                made_up(kind, side, side, seed=seed, number=number, name=name).to(claim.device)
                for name in ("dy", "x", "w")
            )
            at = Position(step=number, call=0, tokens=0)
            tapped = Tapped(layer=layer, at=at, dy=dy, x=x, weight=w)
            for gemm in gemms:
                one, _ = diagnose_product(tapped, gemm, draws=2)
                values = [
                    torch.nan if one is None else one
                    for one in (one.gain, one.relative_error, one.bias_share)
                ]
                sums[gemm].append((torch.tensor(values), torch.ones(3)))
            done(1)
        for gemm in gemms:
            gain, error, bias = ratios(sums[gemm])
            bf16 = 2.0**-18 / error.value**2 if error.value else 1.0
            unbiased = (
                gain.is_at(1.0)
                and bias.value is not None
                and bias.error is not None
                and bias.value <= bf16 + BOUND * bias.error
            )
            found.append(
                ProductCertificate(
                    gemm=gemm, kind=kind, gain=gain, relative_error=error, bias_share=bias, bf16=bf16,
                    unbiased=unbiased,
                )
            )  # fmt: skip
    return sorted(found, key=lambda one: GEMMS.index(one.gemm))
