"""The built-in models: decoders like Llama (Touvron et al. 2302.13971) and GPT-2.

Master weights in fp32, activations in bf16. The linear layers of the blocks follow the recipe. Embedding,
norms, the products inside attention and the router of experts stay in high precision, and so does the head
unless a rule matches it. q, k and v are one linear layer, gate and up another, as in Megatron and
TransformerEngine, so that their input is quantised once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ablate.layers.linear import QuantLinear, local_rows, quantised_layers
from ablate.numerics.philox import Key, philox4x32
from ablate.recipes import row_group
from ablate.run.architecture import model_places

if TYPE_CHECKING:
    from ablate.layers.state import RecipeState
    from ablate.run.config import ModelConfig


Choose = Callable[[int, Tensor, Tensor], Tensor]
"""(mixture's number, token ids [tokens], the router's choices) → the experts to take, as the choices."""


class Decoder(nn.Module):
    """Tokens [batch, positions] → logits [batch, positions, vocabulary] in bf16.

    ``balance`` is the load-balancing loss of the last forward pass, or None where no router chooses experts.
    ``choose``, if set, is asked for the experts of each token.
    """

    def __init__(
        self, config: ModelConfig, vocab_size: int, seq_len: int, state: RecipeState
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(vocab_size, config.width))
        if config.architecture == "gpt":
            self.positions = nn.Parameter(torch.empty(seq_len, config.width))
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.norm = _Norm(config)
        self.head = _Linear(config.width, vocab_size, bias=False)
        if config.tied_head:
            self.head.weight = self.embedding
        layer_places = model_places(config)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                place = layer_places[name]
                QuantLinear.take_over(module, name=name, state=state, place=place)
        self.mixtures = [
            module for module in self.modules() if isinstance(module, Experts)
        ]
        for mixture in self.mixtures:
            groups = [mixture.rows_multiple]
            for layer in quantised_layers(mixture).values():
                groups += [row_group(recipe) for _, recipe in layer.phases]
            mixture.rows_multiple = max(groups)
        self.choose: Choose | None = None
        if config.routing == "fixed":
            self.choose = partial(_by_hash, state.seed, config.experts or 1)
        self.balance: Tensor | None = None

    def initialise(self, generator: torch.Generator) -> None:
        """Draw all weights: normal, with outputs to the residual stream scaled by 1 / √(2 layers).

        For a sharded model each process draws all weights, one after the other, and keeps its rows.
        """
        shrink = 1 / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            local, rows = local_rows(parameter.detach())
            if parameter.dim() == 1:
                local.fill_(float(not name.endswith("bias")))
                continue
            std = self.config.init_std
            if name.endswith(("out.weight", "down.weight")):
                std *= shrink
            whole = torch.empty(parameter.shape, dtype=torch.float32)
            nn.init.normal_(whole, std=std, generator=generator)
            local.copy_(whole[rows])
        for layer in quantised_layers(self).values():
            layer.forget_amax()

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the logits of the next token at every position, and set ``balance``."""
        x = F.embedding(tokens, self.embedding.to(torch.bfloat16))
        rotation = None
        if self.config.architecture == "gpt":
            x = x + self.positions[: tokens.shape[1]].to(x.dtype)
        else:
            # Cos and sin of the rotary angles, bf16 [positions, head_dim / 2] (Su et al. 2104.09864).
            count = partial(torch.arange, dtype=torch.float32, device=tokens.device)
            half = self.config.width // self.config.heads // 2
            angle = torch.outer(
                count(tokens.shape[1]), self.config.rope_base ** (-count(half) / half)
            )
            rotation = (angle.cos().to(torch.bfloat16), angle.sin().to(torch.bfloat16))
        for number, mixture in enumerate(self.mixtures):
            mixture.choose = self.choose and partial(
                self.choose, number, tokens.flatten()
            )
        for block in self.blocks:
            x = block(x, rotation)
        self.balance = None
        if self.mixtures and self.config.routing != "fixed":
            balances: list[Any] = [mixture.balance for mixture in self.mixtures]
            self.balance = torch.stack(balances).mean()
        logits: Tensor = self.head(self.norm(x))
        return logits


class _Linear(nn.Linear):
    """A linear layer without drawn weights: the decoder draws all of them."""

    def reset_parameters(self) -> None:
        pass


class _Norm(nn.Module):
    """GPT's layer norm, which has a bias, or Llama's root mean square norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.empty(config.width))
        self.bias = (
            nn.Parameter(torch.empty(config.width))
            if config.architecture == "gpt"
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        if self.bias is None:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        return F.layer_norm(x, weight.shape, weight, self.bias.to(x.dtype), self.eps)


class _Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = _Norm(config)
        self.attention = _Attention(config)
        self.ffn_norm = _Norm(config)
        self.ffn: nn.Module = (
            Experts(config) if config.experts else _FeedForward(config)
        )

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.kv_heads = config.kv_heads or config.heads
        self.head_dim = config.width // config.heads
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        is_gpt = config.architecture == "gpt"
        self.qkv = _Linear(config.width, rows, bias=is_gpt)
        self.out = _Linear(config.width, config.width, bias=is_gpt)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        batch, positions, width = x.shape
        heads = self.qkv(x).view(batch, positions, -1, self.head_dim).transpose(1, 2)
        qk, v = heads.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        if rotation is not None:
            qk = _Rotate.apply(qk, *rotation)
        q, k = qk.split((self.heads, self.kv_heads), dim=1)
        y = _causal_attention(q, k, v)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, positions, width))
        return out


class _FeedForward(nn.Module):
    """GPT's GELU, or Llama's SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.is_gpt = config.architecture == "gpt"
        if self.is_gpt:
            self.up = _Linear(config.width, config.ffn)
        else:
            self.gate_up = _Linear(config.width, 2 * config.ffn, bias=False)
        self.down = _Linear(config.ffn, config.width, bias=self.is_gpt)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_gpt:
            inner = F.gelu(self.up(x), approximate="tanh")
        else:
            gate, up = self.gate_up(x).chunk(2, dim=-1)
            inner = F.silu(gate) * up
        out: Tensor = self.down(inner)
        return out


class Experts(nn.Module):
    """x [batch, positions, width] → the same, each token through the few experts of its route.

    No token is dropped (as in Mixtral, Jiang et al. 2401.04088). The router computes in fp32 and follows no
    recipe; the experts' linear layers do. Blocks and Hadamard groups of Wgrad run along the tokens, so the
    tokens of an expert are padded with zero rows to whole groups, which changes neither its output nor its
    gradients. ``shares`` [experts]: the part of the last pass's choices that fell on each expert.
    ``balance``: its load-balancing loss, at best 1, as in Switch (Fedus et al. 2101.03961, section 2.2):
    experts × Σ share × mean probability.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        count = config.experts or 1
        self.experts = nn.ModuleList(_FeedForward(config) for _ in range(count))
        self.router = nn.Parameter(torch.empty(count, config.width))
        self.per_token = min(config.experts_per_token, count)
        self.rows_multiple = 1  # the decoder sets it by the experts' recipes
        self.choose: Callable[[Tensor], Tensor] | None = None
        self.shares: Tensor | None = None
        self.balance: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Sum the chosen experts' outputs, weighted by their renormalised probabilities; set the figures."""
        rows = x.reshape(-1, x.shape[-1])
        probabilities = torch.softmax(rows.float() @ self.router.float().t(), dim=-1)
        taken, chosen = probabilities.topk(self.per_token, dim=-1)
        if self.choose is not None:
            chosen = self.choose(chosen)
            taken = probabilities.gather(-1, chosen)
        weights = (taken / taken.sum(dim=-1, keepdim=True)).to(x.dtype)
        count = len(self.experts)
        choices = F.one_hot(chosen, count).sum(dim=1).float()
        self.shares = choices.mean(dim=0) / self.per_token
        self.balance = count * (self.shares * probabilities.mean(dim=0)).sum()
        out = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            # the routes are unknown without values: assume an even share
            if chosen.is_meta:
                even = math.ceil(chosen.numel() / count)
                tokens = choice = torch.zeros(even, dtype=torch.long, device="meta")
            else:
                tokens, choice = torch.where(chosen == index)
            fill = (
                -len(tokens) % self.rows_multiple if len(tokens) else self.rows_multiple
            )
            y = expert(F.pad(rows[tokens], (0, 0, 0, fill)))[: len(tokens)]
            # A token reaches an expert at most once, so the order of these sums is always the same.
            out = out.index_add(0, tokens, y * weights[tokens, choice, None])
        return out.view_as(x)


def _by_hash(
    seed: int, experts: int, number: int, tokens: Tensor, chosen: Tensor
) -> Tensor:
    """Choose by a random hash of the token's id (Roller et al. 2106.04426), in each mixture another."""
    key = Key(seed=seed, layer=str(number), gemm="router", operand="tokens", step=0)
    none = torch.zeros((), dtype=torch.long, device=tokens.device)
    counter = tokens[:, None], torch.arange(experts, device=tokens.device), none, none
    return philox4x32(counter, key.words())[0].topk(chosen.shape[-1]).indices


class _Rotate(torch.autograd.Function):
    """Rotate the pairs (x[i], x[i + half]) by their angles; the gradient rotates back.

    One function, because autograd's version passes over memory about three times as often.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grads[0], cos, sin, -1.0), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=direction)
    return out


def _causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over [batch, heads, positions, head_dim]; k and v may have fewer heads."""
    if q.is_cuda:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
    # Written out: on CPUs the backward pass of torch's fused bf16 attention takes about three times as long.
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
    positions = q.shape[2]
    mask = torch.full(
        (positions, positions), float("-inf"), dtype=q.dtype, device=q.device
    ).triu(1)
    scores = torch.matmul(q, k.transpose(-1, -2)) * (q.shape[-1] ** -0.5) + mask
    return torch.matmul(torch.softmax(scores, dim=-1), v)
