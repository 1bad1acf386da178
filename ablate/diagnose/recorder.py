"""Diagnosis along a run: on some steps chosen layers are tapped and measured before the weights change.

Nothing that training reads is written: tensors are copied, draws have their own streams, and torch's
generators stay unchanged. Of each layer, the first tokens of the step's first micro-batch are measured, up to
``MAX_ROWS``, quantised as in a forward and backward pass of these tokens alone; that bounds the cost.

The exact product is that of the same bf16 tensors in fp32: the layer's bf16 product without the rounding of
its output. A GEMM's own output is rounded to bf16 once, as in training, which alone is a relative error of
about 0.2 %. GEMMs with both operands in high precision are left out, because nothing in them is quantised.

Draws of the recipe's randomness come from streams that training never reads (``Position.redrawn``).
Values that the recipe draws once for the whole run (signs per layer, or one fixed vector) stay the same as
in training, and their effect counts as bias.

Zeros that fill an operand up to whole blocks count among its elements.

Of the built-in mixture also the load of its experts is noted, as the step's last micro-batch had it.

How it fails: undefined figures are None; a run that diverges is not diagnosed on its last step.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ablate.backends.protocol import dequantised
from ablate.diagnose import measure
from ablate.layers.linear import Pass, QuantLinear, filled, quantised_layers
from ablate.models.decoder import Experts
from ablate.numerics.quantiser import on_grid, turned
from ablate.recipes import GEMMS, OPERANDS, Gemm, LayerRecipe
from ablate.run.diagnostics import Diagnostics, chosen_layers

if TYPE_CHECKING:
    from collections.abc import Callable

    from ablate.layers.state import Position
    from ablate.train.step import Trainee

MAX_ROWS = 512
"""Largest number of tokens measured per layer."""
_LARGEST_GROUP = 256
_PARTS = 4


@dataclass(frozen=True, kw_only=True)
class Tapped:
    """The tensors that a layer multiplied: dy [M, N], x [M, K] and the weight [N, K] in bf16.

    ``sequences``: the number of consecutive sequences in the M rows; None if rows are no whole sequences.
    """

    layer: QuantLinear
    at: Position
    dy: Tensor
    x: Tensor
    weight: Tensor
    sequences: int | None = None


def draws_of(recipe: LayerRecipe, draws: int) -> dict[Gemm, int]:
    """Return the quantised GEMMs with the draws that each takes: ``draws``, at least 2, or 1 if none differ.

    Two draws may differ also through operands from the forward pass.
    """
    draws_by_gemm: dict[Gemm, int] = {}
    for name in GEMMS:
        gemm = recipe.gemm(name)
        if gemm.is_untouched:
            continue
        policies = [*gemm.sides]
        if any(policy.source != "high_precision" for policy in policies):
            policies += recipe.fprop.sides
        is_random = any(policy.draws_anew for policy in policies)
        draws_by_gemm[name] = draws if is_random else 1
    return draws_by_gemm


@torch.no_grad()
def diagnose_gemm(tapped: Tapped, gemm: Gemm, *, draws: int) -> dict[str, Any]:
    """Measure one GEMM's output and its quantised operands, and for Wgrad the noise of the data.

    Returns the layer, the GEMM and the figures of ``measure``: ``product``, ``operands`` by name, and
    ``data_noise``, None but for Wgrad.
    """
    layer = tapped.layer
    tensors = {"dy": tapped.dy, "x": tapped.x, "w": tapped.weight}
    left, right = (tensors[name].float() for name in OPERANDS[gemm])
    noise = None
    if gemm == "fprop":
        exact = left @ right.t()
    elif gemm == "dgrad":
        exact = left @ right
    else:
        sequences = tapped.sequences or 1
        num_parts = next(count for count in (_PARTS, 2, 1) if sequences % count == 0)
        exact = torch.zeros_like(tapped.weight, dtype=torch.float32)
        energies = []
        for dy_part, x_part in zip(
            left.chunk(num_parts), right.chunk(num_parts), strict=True
        ):
            product_part = dy_part.t() @ x_part
            energies.append(measure.energy_of(product_part))
            exact += product_part
        noise = measure.data_noise(energies, measure.energy_of(exact), sequences)
    positions = map(tapped.at.redrawn, range(1, draws + 1))
    outputs = (
        Pass(layer, at, tapped.x, tapped.weight, tapped.dy).product(gemm)
        for at in positions
    )
    figures = measure.product_figures(exact, outputs, per_token=gemm != "wgrad")
    operands = {}
    position = tapped.at.redrawn(1)
    plan = layer.plan(position.tokens, tapped.x.device)
    for operand in (plan.gemms[gemm].left, plan.gemms[gemm].right):
        policy = operand.policy
        if policy.is_high_precision:
            continue
        stored = tensors[operand.name]
        if policy.source != "high_precision":  # measure only this second quantisation
            forward = plan.operand("fprop", operand.name)
            stored = dequantised(layer.operand(stored, forward, position))
        if policy.source == "forward_bf16":
            stored = stored.to(torch.bfloat16)
        if operand.name != "w":
            stored = filled(stored, plan.token_group)
        draw = layer.draw(stored, operand, position)
        grid = on_grid(
            stored, policy, axis=operand.axis, key=draw.key, amax=draw.amax_number
        )
        quantised = dequantised(layer.operand(stored, operand, position))
        operands[operand.name] = measure.operand_figures(
            grid,
            turned(quantised.float(), operand.axis),
            turned(stored.float(), operand.axis),
        )
    return {
        "layer": layer.name,
        "gemm": gemm,
        "product": figures,
        "operands": operands,
        "data_noise": noise,
    }


class Recorder:
    """Measures a model's layers on the steps that are due.

    ``on_row`` receives one row per layer and GEMM, and one per mixture, as in ``diagnostics.jsonl``, without
    the time.
    """

    def __init__(
        self,
        trainee: Trainee,
        settings: Diagnostics,
        on_row: Callable[[dict[str, Any]], None],
    ) -> None:
        self._settings = settings
        self._on_row = on_row
        self._state = trainee.state
        self._tokens_per_step = trainee.plan.tokens_per_step
        self._seq_len = trainee.settings.seq_len
        layers = quantised_layers(trainee.module)
        places = [layer.place for layer in layers.values()]
        wanted = chosen_layers(settings.layers, self._state.recipe, places)
        self._chosen = {name: layers[name] for name in wanted}
        self._tapped: dict[str, Tapped] = {}
        self._modules = dict(trainee.module.named_modules())

    def before(self, step: int) -> None:
        """Tap the layers if this step is due: the first step, and the first after each interval of tokens."""
        tokens = self._tokens_per_step
        every = self._settings.interval(tokens)
        before = (step - 1) * tokens // every if step else -1
        if step * tokens // every > before:
            self._state.tap = self._tap

    def after(self) -> None:
        """Measure the tapped tensors and pass the rows to ``on_row``."""
        if self._state.tap is None:
            return
        self._state.tap = None
        for name, module in self._modules.items():
            if isinstance(module, Experts) and module.shares is not None:
                shares = module.shares.tolist()
                busiest = len(shares) * max(shares)
                self._write("load", layer=name, shares=shares, busiest=busiest)
        for name in self._chosen:
            if name not in self._tapped:
                continue
            tapped = self._tapped.pop(name)
            recipe = tapped.layer.recipe_at(tapped.at.tokens)
            for gemm, draws in draws_of(recipe, self._settings.draws).items():
                figures = diagnose_gemm(tapped, gemm, draws=draws)
                of_product = figures.pop("product")
                self._write("diagnosis", **figures, **of_product)

    def _write(self, kind: str, **figures: Any) -> None:
        state = self._state
        row = {"kind": kind, "tokens": state.tokens, "step": state.step, **figures}
        # To 6 digits: no figure is more exact, and the file gets shorter.
        self._on_row(
            json.loads(json.dumps(row), parse_float=lambda n: float(f"{float(n):.6g}"))
        )

    def _tap(self, name: str, at: Position, *tensors: Tensor) -> None:
        layer = self._chosen.get(name)
        is_first = at.call == 0 and name not in self._tapped
        if layer is not None and is_first and len(tensors[0]):
            self._tapped[name] = tapped_copy(layer, at, *tensors, seq_len=self._seq_len)


def tapped_copy(
    layer: QuantLinear,
    at: Position,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    *,
    seq_len: int,
) -> Tapped:
    """Copy the first rows of the tensors that a layer multiplies."""
    rows, sequences = sampled_rows(len(x), seq_len)
    return Tapped(
        layer=layer,
        at=at,
        sequences=sequences,
        dy=dy[:rows].detach().clone(),
        x=x[:rows].detach().clone(),
        weight=weight.detach().to(torch.bfloat16, copy=True),
    )


def sampled_rows(rows: int, seq_len: int) -> tuple[int, int | None]:
    """Choose how many of a layer's first rows to measure; return also the number of whole sequences in them.

    That number is None if the rows are not whole sequences (as an expert's). Every group that divides all
    rows must also divide the measured rows.
    """
    is_whole = rows % seq_len == 0
    if rows <= MAX_ROWS:
        return rows, rows // seq_len if is_whole else None
    if is_whole:
        for sequences in range(MAX_ROWS // seq_len, 0, -1):
            if sequences * seq_len % _LARGEST_GROUP == 0:
                return sequences * seq_len, sequences
    return MAX_ROWS, None
