"""A mixture of experts as a block's feed-forward: each token passes through the few experts of its route.

No token is dropped (as in Mixtral, Jiang et al. 2401.04088). The router computes in fp32 and follows no
recipe; the experts' linear layers do. Blocks and Hadamard groups of Wgrad lie along the tokens, so the tokens
of an expert are padded with zero rows to whole groups, which changes neither its output nor its gradients.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ablate.layers.linear import QuantLinear
from ablate.recipes import block_shape

if TYPE_CHECKING:
    from collections.abc import Iterable


class Experts(nn.Module):
    """x [batch, positions, width] → the same. ``balance``: the last pass's load-balancing loss, at best 1.

    As in Switch (Fedus et al. 2101.03961, section 2.2): experts × Σ share of tokens × mean probability.
    """

    def __init__(self, experts: Iterable[nn.Module], *, width: int, per_token: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)
        self.router = nn.Parameter(torch.empty(len(self.experts), width))
        self.per_token = min(per_token, len(self.experts))
        self.rows_multiple = max(map(_rows_multiple, self.experts))
        self.balance: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the experts' outputs, weighted by the router's probabilities among the chosen experts."""
        rows = x.reshape(-1, x.shape[-1])
        probabilities = torch.softmax(rows.float() @ self.router.float().t(), dim=-1)
        taken, chosen = probabilities.topk(self.per_token, dim=-1)
        weights = (taken / taken.sum(dim=-1, keepdim=True)).to(x.dtype)
        shares = F.one_hot(chosen, len(self.experts)).sum(dim=1).float().mean(dim=0) / self.per_token
        self.balance = len(self.experts) * (shares * probabilities.mean(dim=0)).sum()
        out = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            tokens, place = _of_expert(chosen, index, len(self.experts))
            fill = -len(tokens) % self.rows_multiple if len(tokens) else self.rows_multiple
            y = expert(F.pad(rows[tokens], (0, 0, 0, fill)))[: len(tokens)]
            # A token reaches an expert at most once, so the order of these sums is always the same.
            out = out.index_add(0, tokens, y * weights[tokens, place, None])
        return out.view_as(x)


def _of_expert(chosen: Tensor, index: int, experts: int) -> tuple[Tensor, Tensor]:
    """Return the tokens of an expert, and the expert's place among each token's choices."""
    if chosen.is_meta:  # the routes are unknown without values: assume an even share
        count = math.ceil(chosen.numel() / experts)
        return torch.zeros(count, dtype=torch.long, device="meta"), torch.zeros(
            count, dtype=torch.long, device="meta"
        )
    tokens, place = torch.where(chosen == index)
    return tokens, place


def _rows_multiple(expert: nn.Module) -> int:
    """Return the number that must divide an expert's rows: the largest block or group of its recipes."""
    sizes = [
        max(*block_shape(policy), policy.hadamard)
        for layer in expert.modules()
        if isinstance(layer, QuantLinear)
        for _, recipe in layer.state.stages(layer.place)
        for _, _, policy in recipe.operands()
    ]
    return max(sizes, default=1)
