"""Diagnosis along a run: on some steps chosen layers are tapped and measured before the weights change.

Nothing that training reads is written: tensors are copied, draws have their own streams, and torch's
generators stay unchanged. Of each layer, the first tokens of the step's first micro-batch are measured, up to
``MAX_ROWS``, quantised as in a forward and backward pass of these tokens alone; that bounds the cost.

How it fails: undefined figures are None; a run that diverges is not diagnosed on its last step.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ablate.diagnose.layer import GemmDiagnosis, Tapped, diagnose_layer
from ablate.layers.linear import quantised_layers
from ablate.run.diagnostics import chosen_layers

if TYPE_CHECKING:
    from collections.abc import Callable

    from ablate.layers.linear import QuantLinear
    from ablate.layers.state import Position
    from ablate.run.diagnostics import Diagnostics
    from ablate.train.loop import Trainee

MAX_ROWS = 512
"""Largest number of tokens measured per layer."""
_LARGEST_GROUP = 256


class Recorder:
    """Measures a model's layers on the steps that are due.

    ``on_row`` receives one row per layer and GEMM, as in ``diagnostics.jsonl``, without the time.
    """

    def __init__(
        self, trainee: Trainee, settings: Diagnostics, on_row: Callable[[dict[str, Any]], None]
    ) -> None:
        self._settings, self._on_row = settings, on_row
        self._state, self._tokens_per_step = trainee.state, trainee.plan.tokens_per_step
        self._seq_len = trainee.settings.seq_len
        layers = quantised_layers(trainee.network.module)
        names = chosen_layers(settings.layers, self._state.recipe, self._state.places.values())
        self._chosen = {name: layers[name] for name in names}
        self._found: dict[str, Tapped] = {}

    def before(self, step: int) -> None:
        """Tap the layers if this step is due: the first step, and the first after each interval of tokens."""
        tokens = self._tokens_per_step
        every = self._settings.interval(tokens)
        before = (step - 1) * tokens // every if step else -1
        if step * tokens // every > before:
            self._state.tap = self._tap

    def after(self) -> None:
        """Measure the tapped tensors and pass the rows to ``on_row``."""
        self._state.tap = None
        for name in self._chosen:
            if (tapped := self._found.pop(name, None)) is not None:
                for one in diagnose_layer(tapped, draws=self._settings.draws):
                    self._on_row(to_row(one, tokens=self._state.tokens, step=self._state.step))

    def _tap(self, name: str, at: Position, dy: Tensor, x: Tensor, weight: Tensor) -> None:
        if at.call == 0 and name in self._chosen and name not in self._found and len(x):
            self._found[name] = tapped_copy(self._chosen[name], at, dy, x, weight, seq_len=self._seq_len)


def tapped_copy(
    layer: QuantLinear, at: Position, dy: Tensor, x: Tensor, weight: Tensor, *, seq_len: int
) -> Tapped:
    """Copy the first rows of the tensors that a layer multiplies."""
    rows, sequences = sampled_rows(len(x), seq_len)
    return Tapped(
        layer=layer,
        at=at,
        dy=dy[:rows].detach().clone(),
        x=x[:rows].detach().clone(),
        weight=weight.detach().to(torch.bfloat16, copy=True),
        sequences=sequences,
    )


def sampled_rows(rows: int, seq_len: int) -> tuple[int, int | None]:
    """Return the number of a layer's first rows to measure, and the number of whole sequences in them.

    The second is None if the layer's rows are no whole sequences (an expert's). Every group that divides all
    rows must also divide the measured rows.
    """
    whole = rows % seq_len == 0
    if rows <= MAX_ROWS:
        return rows, rows // seq_len if whole else None
    if whole:
        for sequences in range(MAX_ROWS // seq_len, 0, -1):
            if sequences * seq_len % _LARGEST_GROUP == 0:
                return sequences * seq_len, sequences
    return MAX_ROWS, None


def to_row(one: GemmDiagnosis, *, tokens: int, step: int) -> dict[str, Any]:
    """Return a diagnosis as a row of finite numbers or None; ``tokens`` were seen before the step."""
    figures = {
        **asdict(one.product),
        "operands": {name: asdict(figures) for name, figures in one.operands.items()},
        "data_noise": None if one.data_noise is None else asdict(one.data_noise),
    }
    row = {"kind": "diagnosis", "tokens": tokens, "step": step, "layer": one.layer, "gemm": one.gemm}
    return row | {name: _rounded(value) for name, value in figures.items()}


def _rounded(value: Any) -> Any:
    """Round the numbers in plain data to 6 digits: no figure is more exact, and the file gets shorter."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, (list, tuple)) else value
