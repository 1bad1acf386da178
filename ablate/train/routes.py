"""The routes of a mixture's tokens: recorded in one run, replayed in others, so that all have the same.

``routes.jsonl`` has a row for each layer of each forward pass, in training and in evaluation:
``{"step", "call", "layer", "experts"}``. ``experts`` are the choices [tokens, experts per token] as int16,
deflated, in base64: at most 0.75 bytes a choice of 8 experts. A pass that is repeated (recomputed
activations, a second evaluation) has the routes of the first.

How it fails: a record that is damaged, or without the row that is asked for, is a ``UserError``.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ablate.base.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ablate.train.step import Trainee


def record(trainee: Trainee, write: Callable[[dict[str, Any]], None]) -> None:
    """Leave the choice to the router, and write it down."""
    state = trainee.state
    known: set[tuple[int, int | None, int]] = set()

    def choose(layer: int, _tokens: Tensor, chosen: Tensor) -> Tensor:
        if known and next(iter(known))[0] != state.step:
            known.clear()
        key = (state.step, state.call, layer)
        if key not in known:
            known.add(key)
            choices = chosen.to("cpu", torch.int16).numpy().astype("<i2").tobytes()
            experts = base64.b64encode(zlib.compress(choices)).decode()
            row = dict(zip(("step", "call", "layer"), key, strict=True))
            write(row | {"experts": experts})
        return chosen

    trainee.module.choose = choose  # type: ignore[assignment]


def replay(trainee: Trainee, path: Path) -> None:
    """Take the choices of a record in place of the router's."""
    state = trainee.state
    places: dict[tuple[int, int | None, int], int] = {}
    try:
        with path.open("rb") as file:
            while line := file.readline():
                row = json.loads(line)
                key = (row["step"], row["call"], row["layer"])
                places.setdefault(key, file.tell() - len(line))
    except (OSError, ValueError, KeyError, TypeError) as error:
        fault = f"the record of routes cannot be read: {error}"
        raise UserError(fault, file=path) from None

    def choose(layer: int, _tokens: Tensor, chosen: Tensor) -> Tensor:
        try:
            with path.open("rb") as file:
                file.seek(places[state.step, state.call, layer])
                experts = json.loads(file.readline())["experts"]
            content = bytearray(zlib.decompress(base64.b64decode(experts)))
            recorded = torch.frombuffer(content, dtype=torch.int16).view(chosen.shape)
        except (OSError, ValueError, RuntimeError, LookupError, TypeError, zlib.error):
            fault = f"the record of routes is damaged or ends before step {state.step}, layer {layer}"
            raise UserError(fault, file=path) from None
        return recorded.to(chosen)

    trainee.module.choose = choose  # type: ignore[assignment]
