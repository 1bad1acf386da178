"""``ablate check RECIPE``: whether a quantiser is what it claims to be, and what it does on average.

1. Bits: on made-up tensors and on corner cases the subject is held against plain torch, and each difference
   gets a cause. Codes and scales must be the same; the sign of zero and a last bit of the output may differ.
2. Figures of each operand on four kinds of data, with standard errors over tensors. For a function they must
   be the definition's within 5 standard errors.

How it fails: ``UserError``, from ``claims``; undefined figures are None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from ablate.backends.testing.inputs import KINDS, corners, made_up
from ablate.backends.testing.suite import one_thread
from ablate.check.claims import Claim, ClaimedOperand, without_rotation
from ablate.check.differences import HARMLESS, Differences, compare, defined, definition_of, in_words
from ablate.check.figures import RoundingFigures, Sums
from ablate.numerics.rotate import rotate
from ablate.recipes import block_shape

if TYPE_CHECKING:
    from collections.abc import Callable

SIDE = 512
"""Rows and columns of a tensor whose rounding is measured."""
COMPARED = 2
"""Tensors of each kind that are held against the definition bit by bit."""


class Corner(NamedTuple):
    """A corner case in words: what the subject does, and what the definition says."""

    name: str
    found: str
    expected: str


@dataclass(frozen=True, kw_only=True)
class OperandCertificate:
    """One operand, or several that nothing tells apart.

    ``definition``: its figures, for a function alone. ``disagreements``: the figures of a function that are
    not the definition's, each with the kind of data.
    """

    operand: ClaimedOperand
    figures: dict[str, RoundingFigures]
    definition: dict[str, RoundingFigures]
    disagreements: tuple[str, ...]
    corners: tuple[Corner, ...]
    compared: int
    differences: tuple[Differences, ...]

    @property
    def holds(self) -> bool:
        """Whether the operand is what it claims to be."""
        return not self.disagreements and all(one.cause in HARMLESS for one in self.differences)


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What was found about a claim."""

    claim: Claim
    draws: int
    operands: tuple[OperandCertificate, ...]

    @property
    def holds(self) -> bool:
        """Whether every operand is what it claims to be."""
        return all(one.holds for one in self.operands)


def work(claim: Claim, draws: int) -> int:
    """Return how many tensors ``certify`` measures: the length of a progress bar."""
    return len(KINDS) * len(claim.operands) * draws


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
    return Certificate(claim=claim, draws=draws, operands=operands)


def _operand(
    claim: Claim, operand: ClaimedOperand, draws: int, seed: int, done: Callable[[int], None]
) -> OperandCertificate:
    """Quantise made-up tensors of each kind, then the corner cases."""
    policy, axis = operand.policy, operand.axis
    is_function = claim.is_function
    # A recipe draws the words of its definition; a function has its own.
    random = operand.is_random and is_function
    counted: dict[str, Differences] = {}
    figures, definition, disagreements, compared = {}, {}, [], 0
    for kind in KINDS:
        ours, theirs = Sums(block_shape(policy)[1]), Sums(block_shape(policy)[1])
        for number in range(draws):
            stored = made_up(kind, SIDE, SIDE, seed=seed, number=number)
            keys = [operand.key(number, draw, seed) for draw in range(2)]
            drawn = keys if operand.is_random else keys[:1]
            last = (stored if axis == 1 else stored.t()).to(torch.float32).contiguous()
            exact = rotate(last, policy, keys[0])
            # A function may be random where its definition is not.
            outputs = [claim.quantise(stored, operand, key) for key in (keys if is_function else drawn)]
            ours.add(exact, outputs)
            if is_function:
                theirs.add(exact, [defined(stored, policy, axis, key) for key in drawn])
            if number < COMPARED:
                compare(
                    outputs[0], definition_of(stored, policy, axis, keys[0], random=random), kind, counted
                )
                compared += exact.numel()
            done(1)
        figures[kind] = ours.figures()
        if is_function:
            definition[kind] = theirs.figures()
            what = _disagreements(figures[kind], definition[kind])
            disagreements += [f"{name} ({kind})" for name in what]
    cases = []
    plain = ClaimedOperand(names=operand.names, policy=without_rotation(policy), axis=1)
    key = plain.key(0, 0, seed)
    for name, probe in corners(plain.policy, seed=seed, rows=128).items():
        found, rule = (
            claim.quantise(probe, plain, key),
            definition_of(probe, plain.policy, 1, key, random=random),
        )
        words = (in_words(name, one, rule.grid, plain.policy) for one in (found, rule.values))
        cases.append(Corner(name, *words))
        compare(found, rule, name, counted)
        compared += found.numel()
    return OperandCertificate(
        operand=operand, figures=figures, definition=definition, disagreements=tuple(disagreements),
        corners=tuple(cases), compared=compared, differences=tuple(counted.values()),
    )  # fmt: skip


def _disagreements(ours: RoundingFigures, theirs: RoundingFigures) -> list[str]:
    """Name the figures of a function that are not its definition's."""
    positions = zip(ours.by_position, theirs.by_position, strict=True)
    agrees = {
        "gain": ours.gain.agrees_with(theirs.gain),
        "relative error": ours.relative_error.agrees_with(theirs.relative_error),
        "bias share": ours.bias_share.agrees_with(theirs.bias_share),
        "gain by position": all(one.agrees_with(other) for one, other in positions),
        "independence of the noise": ours.largest_alike is None or theirs.largest_alike is not None,
    }
    return [name for name, agreed in agrees.items() if not agreed]
