"""The work of a layer, planned when its recipe is first used on a device: a step only carries it out.

What a step needs of a recipe is the same in every step: each operand's policy, contraction axis and random
stream, each GEMM's back end, and what its product passes back through. Only step and call are new.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ablate.backends.device import triton_fault
from ablate.backends.triton.policies import refusal
from ablate.numerics.philox import Key
from ablate.recipes import GEMMS, OPERANDS, token_group
from ablate.recipes.policy import NO_ROTATION, contracted_axis

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from ablate.backends.protocol import Backend
    from ablate.layers.state import Position, RecipeState
    from ablate.recipes import Gemm, LayerRecipe, OperandPolicy


@dataclass(frozen=True, kw_only=True)
class PlannedOperand:
    """One operand of one GEMM.

    ``axis``: its contraction axis. ``stream``: its random stream at step and call 0; None if its policy draws
    nothing. ``history``: the row of its past magnitudes, if its scale is delayed.
    """

    gemm: Gemm
    name: str
    axis: int
    policy: OperandPolicy
    device: torch.device
    backend: Backend
    stream: Key | None
    history: int | None

    def key(self, at: Position) -> Key | None:
        """Return the key of this operand's random draw at a position; None if its policy draws nothing."""
        stream = self.stream
        if stream is None:
            return None
        return Key(
            seed=stream.seed,
            layer=stream.layer,
            gemm=stream.gemm,
            operand=stream.operand,
            step=at.stream_step,
            call=at.call,
        )


@dataclass(frozen=True, kw_only=True)
class PlannedGemm:
    """One GEMM of a layer.

    ``way_back``: the policy of the forward operand whose gradient this product is, where the gradient passes
    back through its mask, or through its rotation (left out of the policy where it does not); else None.
    """

    left: PlannedOperand
    right: PlannedOperand
    backend: Backend
    way_back: OperandPolicy | None


@dataclass(frozen=True, kw_only=True)
class PlannedLayer:
    """The three GEMMs of a layer by one recipe on one device.

    ``token_group``: what must divide its tokens. ``dy_in_one_read``: whether the back end quantises dy for
    Dgrad and Wgrad together. ``is_plain``: whether all three are the device's own bf16 GEMM of untouched
    operands.
    """

    recipe: LayerRecipe
    gemms: Mapping[Gemm, PlannedGemm]
    token_group: int
    dy_in_one_read: bool
    is_plain: bool

    def operand(self, gemm: Gemm, name: str) -> PlannedOperand:
        """Return an operand by its GEMM and name."""
        planned = self.gemms[gemm]
        if planned.left.name == name:
            return planned.left
        return planned.right


def plan_layer(
    recipe: LayerRecipe,
    layer: str,
    state: RecipeState,
    device: torch.device,
    histories: Mapping[tuple[Gemm, str], int],
) -> PlannedLayer:
    """Plan a layer's work by one recipe on a device.

    ``histories``: the rows of past magnitudes of the operands with delayed scales.

    Raises:
        ValueError: the named back end does not support a GEMM.
    """
    gemms: dict[Gemm, PlannedGemm] = {}
    for gemm in GEMMS:
        policies = recipe.gemm(gemm)
        backend = state.backend.of(policies, str(device))
        operands = []
        for name, policy in zip(OPERANDS[gemm], policies.sides, strict=True):
            stream = None
            if policy.draws_anew or policy.signs != "none":
                stream = Key(
                    seed=state.seed,
                    layer=layer,
                    gemm=gemm,
                    operand=state.stream_of(name),
                    step=0,
                )
            operands.append(
                PlannedOperand(
                    gemm=gemm,
                    name=name,
                    axis=contracted_axis(gemm, name),
                    policy=policy,
                    device=device,
                    backend=backend,
                    stream=stream,
                    history=histories[gemm, name]
                    if policy.scale == "delayed"
                    else None,
                )
            )
        left, right = operands
        way_back = _way_back(recipe, gemm, right.policy)
        gemms[gemm] = PlannedGemm(
            left=left, right=right, backend=backend, way_back=way_back
        )
    dgrad, wgrad = gemms["dgrad"].backend, gemms["wgrad"].backend
    return PlannedLayer(
        recipe=recipe,
        gemms=gemms,
        token_group=token_group(recipe),
        dy_in_one_read=dgrad is wgrad and dgrad.one_read,
        is_plain=all(
            recipe.gemm(gemm).is_untouched and planned.backend.name == "emulated"
            for gemm, planned in gemms.items()
        ),
    )


def work_of_the_host(recipe: LayerRecipe) -> str | None:
    """Say what of a layer's work on a GPU needs the CPU; None if nothing does."""
    for gemm in GEMMS:
        policies = recipe.gemm(gemm)
        if policies.accumulate != "fp32":
            return f"sums of {gemm} by a model of hardware may wait for the host"
        for name, policy in zip(OPERANDS[gemm], policies.sides, strict=True):
            why = triton_fault() or refusal(policy)
            needs_numbers = (
                policy.draws_anew or policy.signs != "none" or policy.has_tensor_scale
            )
            if why is not None and needs_numbers:
                return f"plain torch quantises {gemm}'s {name} ({why})"
        way_back = _way_back(recipe, gemm, policies.right)
        if way_back is not None and way_back.signs != "none":
            return (
                f"the host draws the signs through which {gemm}'s gradient passes back"
            )
    return None


def _way_back(
    recipe: LayerRecipe, gemm: Gemm, right: OperandPolicy
) -> OperandPolicy | None:
    if gemm == "fprop":
        return None
    # dx is x's gradient, dw is w's
    forward = recipe.fprop.left if gemm == "dgrad" else recipe.fprop.right
    if forward.hadamard and right.source != "high_precision":
        return forward
    return replace(forward, **NO_ROTATION) if forward.mask else None
