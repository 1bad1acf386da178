"""Whether a quantiser is what it claims to be, and what it does on average: ``ablate check recipe``.

1. Bits: on made-up tensors and on corner cases the subject is compared with plain torch, and each difference
   gets a cause. Codes and scales must be the same; the sign of zero and a last bit of the output may differ.
2. Figures of each operand on four kinds of data, with standard errors over tensors. Those of a function must
   be the definition's within 5 standard errors.

What is certified: the operands of a recipe as a back end quantises them, or a function of the user's. The
function takes a matrix [rows, k] in bf16, with blocks along k, and returns it dequantised, in the same shape
and in any float dtype. A parameter ``seed`` gets another whole number for each draw; torch's own generator is
seeded with it, too. The function is compared with a policy that the user names, without that policy's
rotation: a rotation is no part of a quantiser.

How it fails: ``UserError`` for a recipe that quantises nothing, a policy that is not named exactly, and a
function that raises or returns no such tensor; undefined figures are None.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ablate.backends.protocol import Draw, dequantised
from ablate.backends.select import Selection
from ablate.backends.testing.inputs import KINDS, corners, made_up
from ablate.backends.testing.suite import both, one_thread
from ablate.base.errors import UserError, with_type
from ablate.check.differences import HARMLESS, Differences, DrawComparison, defined
from ablate.check.figures import RoundingFigures, Sums
from ablate.diagnose.inputs import recipe_of
from ablate.numerics.philox import Key
from ablate.numerics.quantiser import on_grid, turned
from ablate.recipes import OperandPolicy, Recipe, block_shape
from ablate.recipes.policy import NO_ROTATION, contracted_axis

if TYPE_CHECKING:
    from collections.abc import Callable


SIDE = 512
"""Rows and columns of a tensor whose rounding is measured."""
COMPARED = 2
"""Tensors of each kind that are compared with the definition bit by bit."""
_LEFT_OUT = (
    "Checked are the quantisers of layers without a rule, before the first phase; of an operand that is "
    "quantised twice the second time alone; without a permutation drawn anew each call."
)


@dataclass(frozen=True, kw_only=True)
class ClaimedOperand:
    """Operands of one policy that contract over the same axis of the stored matrix, by name: ``wgrad.dy``."""

    names: tuple[str, ...]
    policy: OperandPolicy
    axis: int

    def key(self, number: int, draw: int, seed: int) -> Key:
        """Return the key of a tensor's draw; draws of one tensor share the rotation."""
        gemm, _, operand = self.names[0].partition(".")
        return Key(
            seed=seed,
            layer="certified",
            gemm=gemm,
            operand=operand,
            step=number,
            call=draw,
        )


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What is certified: a recipe on a back end, or a function that claims to be a policy's quantiser.

    ``quantise`` returns a stored matrix after quantising, fp32 [n, k] on the CPU, contraction last and
    rotated. ``backend``: None for a function.
    """

    name: str
    operands: tuple[ClaimedOperand, ...]
    quantise: Callable[[Tensor, ClaimedOperand, Key], Tensor]
    backend: str | None = None
    device: str | None = None
    notes: tuple[str, ...]


def of_function(
    name: str, function: Callable[..., Any], operand: ClaimedOperand
) -> Claim:
    """Make the claim that a function is an operand's quantiser. ``quantise`` raises UserError if it fails."""
    takes_seed = False
    with suppress(TypeError, ValueError):  # it has no signature
        takes_seed = "seed" in inspect.signature(function).parameters

    def quantise(stored: Tensor, operand: ClaimedOperand, key: Key) -> Tensor:
        layout = torch.contiguous_format
        matrix = turned(stored, operand.axis).clone(memory_format=layout)
        seed = 2 * key.step + key.call
        options = {"seed": seed} if takes_seed else {}
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            try:
                result = function(matrix, **options)
            except Exception as error:  # the user's own code may raise anything
                message = f"{name} raised {with_type(error)}"
                hint = "it is called with a bf16 matrix [rows, k], and with seed=… if it has such a parameter"
                raise UserError(message, hint=hint) from error
        if not isinstance(result, Tensor):
            returned = type(result).__name__
        elif result.shape != matrix.shape or not result.is_floating_point():
            returned = f"{result.dtype} {list(result.shape)}"
        else:
            return result.detach().to(torch.float32).cpu()
        fault = f"{name} returned {returned} for a bf16 matrix {list(matrix.shape)}"
        hint = "it returns the dequantised matrix, in the shape that it was given"
        raise UserError(fault, hint=hint)

    notes = ("Held against the policy without its rotation.",)
    return Claim(name=name, operands=(operand,), quantise=quantise, notes=notes)


def of_recipe(name: str, recipe: Recipe, backend: str, device: str) -> Claim:
    """Make the claim that a back end quantises as a recipe says. ``device``: a torch device.

    Raises:
        UserError: the recipe quantises nothing.
    """
    selection = Selection(backend)

    def quantise(stored: Tensor, operand: ClaimedOperand, key: Key) -> Tensor:
        chosen = selection.of(both(operand.policy), device)
        draw = Draw(policy=operand.policy, key=key)
        quantised = chosen.quantize(stored.to(device), draw, axis=operand.axis)
        values = dequantised(quantised).to(torch.float32).cpu()
        return turned(values, operand.axis).contiguous()

    operands = _operands(recipe)
    if not operands:
        raise UserError(
            f"{name}: it quantises nothing in the layers without a rule, before its first phase"
        )
    return Claim(
        name=name,
        operands=operands,
        quantise=quantise,
        backend=backend,
        device=device,
        notes=(_LEFT_OUT,),
    )


def _operands(recipe: Recipe) -> tuple[ClaimedOperand, ...]:
    """List the quantised operands; those of the same axis whose policies quantise alike are one."""
    names: dict[tuple[OperandPolicy, int], list[str]] = defaultdict(list)
    for gemm, operand, policy in recipe.operands():
        if policy.is_high_precision:
            continue
        # Signs drawn each step serve as well as signs drawn each call, and two draws can share them. A
        # permutation without signs is drawn each call, and is left out.
        signs = "step" if policy.signs in ("call", "backward") else policy.signs
        permute = policy.permute and signs != "none"
        plain = replace(
            policy, source="high_precision", mask=False, signs=signs, permute=permute
        )
        names[plain, contracted_axis(gemm, operand)].append(f"{gemm}.{operand}")
    return tuple(
        ClaimedOperand(names=tuple(alike), policy=policy, axis=axis)
        for (policy, axis), alike in names.items()
    )


def operand_of(text: str) -> ClaimedOperand:
    """Return the operand that ``--as`` names (``RECIPE`` or ``RECIPE:wgrad.dy``), without its rotation.

    Raises:
        UserError: there is no such operand, several differ, or it is defined with its rotation.
    """
    recipe, _, wanted = text.rpartition(":")
    is_operand = bool(recipe and re.fullmatch(r"\w+\.\w+", wanted))
    if not is_operand:
        recipe = wanted = text
    names: list[str] = []
    by_policy: dict[OperandPolicy, ClaimedOperand] = {}
    for operand in _operands(recipe_of(recipe, option="--as")):
        names += operand.names
        if not is_operand or wanted in operand.names:
            by_policy[without_rotation(operand.policy)] = operand
    if not by_policy:
        quantised = ", ".join(names) or "nothing"
        raise UserError(
            f"--as: {text} is not quantised", hint=f"its recipe quantises {quantised}"
        )
    if len(by_policy) > 1:
        hint = f"say which of {', '.join(names)}, as in --as {text}:{names[0]}"
        raise UserError(f"--as: the operands of {text} differ", hint=hint)
    ((policy, operand),) = by_policy.items()
    if policy.hadamard:
        message = f"--as: no function can be held against {policy.scale}, which is defined with its rotation"
        raise UserError(message, hint="check the recipe")
    axis = operand.axis if is_operand else 1
    return ClaimedOperand(names=(wanted,), policy=policy, axis=axis)


def without_rotation(policy: OperandPolicy) -> OperandPolicy:
    """Remove a policy's rotation. MS-EDEN keeps it, because it needs the rotation's groups."""
    if policy.scale_rule.is_stochastic:
        return policy
    return replace(policy, **NO_ROTATION)


@dataclass(frozen=True, kw_only=True)
class OperandCertificate:
    """What was found of one operand, or of several that quantise alike.

    ``figures`` are by kind of data, and so are ``definition``, those of the definition: empty for a recipe.
    ``disagreements``: figures of a function that differ from the definition's, each with the kind of data.
    ``compared``: elements compared bit by bit.
    """

    operand: ClaimedOperand
    figures: dict[str, RoundingFigures]
    definition: dict[str, RoundingFigures]
    disagreements: tuple[str, ...]
    compared: int
    differences: tuple[Differences, ...]

    @property
    def holds(self) -> bool:
        """Whether the operand is what it claims to be."""
        return not self.disagreements and all(
            difference.cause in HARMLESS for difference in self.differences
        )


@torch.no_grad()
@one_thread()
def certify(
    claim: Claim,
    operand: ClaimedOperand,
    *,
    draws: int,
    seed: int = 0,
    done: Callable[[int], object],
) -> OperandCertificate:
    """Certify an operand of a claim on made-up tensors of each kind, then on the corner cases.

    Args:
        claim: the recipe or function.
        operand: one of its operands.
        draws: tensors of each kind, at least 8; each is quantised twice where rounding is random.
        seed: of the made-up tensors and of the randomness.
        done: called with 1 for each tensor measured.

    Raises:
        UserError: a function that cannot be called.
    """
    policy = operand.policy
    is_function = claim.backend is None
    # Two draws may differ under one rotation.
    is_random = policy.is_stochastic or policy.scale_rule.is_stochastic
    # A recipe and its definition draw the same words; a function draws its own.
    comparison = DrawComparison(random=is_random and is_function)
    columns = block_shape(policy)[1]
    figures = {}
    definition = {}
    disagreements = []
    for kind in KINDS:
        sums = Sums(columns)
        defined_sums = Sums(columns)
        for number in range(draws):
            stored = made_up(kind, SIDE, SIDE, seed=seed, number=number)
            keys = [operand.key(number, draw, seed) for draw in range(2)]
            defined_keys = keys if is_random else keys[:1]
            grid = on_grid(stored, policy, axis=operand.axis, key=keys[0])
            # A function may be random where its definition is not.
            own_keys = keys if is_function else defined_keys
            outputs = [claim.quantise(stored, operand, key) for key in own_keys]
            sums.add(grid.rotated, outputs, grid.ideal)
            if is_function:
                expected = [
                    defined(stored, policy, operand.axis, key) for key in defined_keys
                ]
                defined_sums.add(grid.rotated, expected, grid.ideal)
            if number < COMPARED:
                comparison.add(
                    outputs[0], stored, policy, operand.axis, keys[0], data=kind
                )
            done(1)
        figures[kind] = sums.figures()
        if is_function:
            definition[kind] = defined_sums.figures()
            unlike = figures[kind].unlike(definition[kind])
            disagreements += [f"{name} ({kind})" for name in unlike]
    plain = ClaimedOperand(names=operand.names, policy=without_rotation(policy), axis=1)
    key = plain.key(0, 0, seed)
    for name, probe in corners(plain.policy, seed=seed, rows=128).items():
        values = claim.quantise(probe, plain, key)
        comparison.add(values, probe, plain.policy, 1, key, data=name)
    return OperandCertificate(
        operand=operand,
        figures=figures,
        definition=definition,
        disagreements=tuple(disagreements),
        compared=comparison.num_values,
        differences=tuple(comparison.by_cause.values()),
    )
