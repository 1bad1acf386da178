"""A short training run on a back end, compared with emulation: the self-test of whole layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ablate.backends.testing.suite import CheckResult, in_short
from ablate.layers.apply import apply_recipe
from ablate.recipes import GEMMS

if TYPE_CHECKING:
    from collections.abc import Iterator

_STEPS = 10
_SHARE_APART = 0.02
"""Largest allowed distance between two loss curves, as a fraction of the first loss: far above the effect of
another accumulation order in ten steps, far below that of a wrong operand."""
_TRAINED: dict[str, Any] = {
    "mxfp4": {"gemms": list(GEMMS), "stabiliser": "sr+rht"},
    "nvfp4": {"preset": "nvidia-nvfp4", "layers": []},
    "fp8": "fp8",
}


def trains_like_emulation(name: str, where: str) -> Iterator[CheckResult]:
    """Train a tiny model for a few steps by every recipe of the back end; compare with emulation on the CPU.

    The quantised bits are equal, so only the accumulation order makes the losses differ, and slowly.
    """
    for recipe, spec in _TRAINED.items():
        try:
            ours = _losses(spec, name, where)
        except ValueError:
            continue  # the back end does not support this recipe
        except Exception as error:
            yield CheckResult(backend=name, check=f"training {recipe}", passed=False, detail=in_short(error))
            continue
        theirs = _losses(spec, "emulated", "cpu")
        apart = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        passed = apart < _SHARE_APART * theirs[0] and ours[-1] < ours[0]
        detail = f"loss {ours[0]:.4f} → {ours[-1]:.4f} in {_STEPS} steps, at most {apart:.5f} from emulation"
        yield CheckResult(backend=name, check=f"training {recipe}", passed=passed, detail=detail)


def _losses(spec: Any, name: str, where: str) -> list[float]:
    """Return the losses of a small network that learns the outputs of a fixed random one."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128, bias=False), nn.GELU(), nn.Linear(128, 64, bias=False))
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.05, generator=generator)
    x, y = (torch.randn(128, size, generator=generator) for size in (128, 64))
    state = apply_recipe(model, spec, seed=1, backend=name, total_tokens=_STEPS * 128)
    model.to(where)
    x, y = x.to(where), y.to(where)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(_STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        state.advance(128)
        losses.append(loss.item())
    return losses
