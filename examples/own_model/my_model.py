"""A model and a training function of one's own, to copy from. ``study.yaml`` names both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from ablate.data.batches import batch, sequence_starts, validation_batches
from ablate.numerics import apply_recipe
from ablate.run.schedule import learning_rate, plan_steps
from ablate.train import Snapshot, TrainResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np

    from ablate.run.config import RunConfig
    from ablate.train import Checkpoints


class Block(nn.Module):
    """Causal attention and a feed-forward, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [sequences, positions, width] to the same shape."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.relu(self.up(self.norms[1](x))).square())


class Net(nn.Module):
    """A small decoder: tokens [sequences, positions] → logits [sequences, positions, vocab_size]."""

    def __init__(
        self, vocab_size: int, seq_len: int, width: int, layers: int, heads: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(seq_len, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        # by its name and place it keeps high precision
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of each next token."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.blocks(self.tokens(tokens) + self.positions(places)))


def build(
    *, vocab_size: int, seq_len: int, width: int = 128, layers: int = 2, heads: int = 4
) -> nn.Module:
    """Return the model; the words after ``seq_len`` are what ``model.options`` may give."""
    return Net(vocab_size, seq_len, width, layers, heads)


class Lion(torch.optim.Optimizer):
    """Lion (2302.06675): steps by the sign of a mean of gradients."""

    def __init__(self, parameters: Iterator[nn.Parameter], *, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        """Change the weights by their gradients."""
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.sub_(torch.sign(0.9 * mean + 0.1 * p.grad), alpha=group["lr"])
                mean.mul_(0.99).add_(p.grad, alpha=0.01)


def train(
    config: RunConfig,
    on_metrics: Callable[[dict[str, Any]], None],
    *,
    tokens: tuple[np.ndarray, np.ndarray],
    should_stop: Callable[[], bool],
    checkpoints: Checkpoints,
    device: str,
) -> TrainResult:
    """Train one run, ``config``, on (training, validation) tokens; return how it ended."""
    settings = config.training
    plan = plan_steps(settings)  # tokens as whole steps
    training, validation = tokens
    torch.manual_seed(config.seed)  # a seed has the same initial weights in all arms
    model = build(
        vocab_size=config.vocab_size, seq_len=settings.seq_len, **config.model.options
    ).to(device)
    state = apply_recipe(
        model,
        config.recipe,
        seed=config.seed,
        backend=config.backend,
        total_tokens=plan.tokens,
    )
    optimizer = Lion(model.parameters(), lr=settings.learning_rate)

    def loss_of(window: np.ndarray) -> torch.Tensor:
        ids = torch.from_numpy(window).to(device)
        with torch.autocast(ids.device.type, dtype=torch.bfloat16):
            logits = model(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    @torch.no_grad()
    def evaluate() -> float:
        model.eval()
        total = 0.0
        count = 0
        for window in validation_batches(
            validation, settings.seq_len, settings.eval_tokens, settings.batch_size
        ):
            total += loss_of(window).item() * len(window)
            count += len(window)
        model.train()
        return total / count

    first = 0
    if (checkpoint := checkpoints.load()) is not None:
        first = checkpoint.step
        model.load_state_dict(checkpoint.whole("model."))
        means = checkpoint.whole("mean.")
        for name, p in model.named_parameters():
            optimizer.state[p]["mean"] = means[name].to(device)
        state.load_state_dict(checkpoint.numbers["recipe"])  # after the weights

    def keep(step: int) -> None:
        tensors = {
            f"model.{name}": tensor for name, tensor in model.state_dict().items()
        }
        for name, p in model.named_parameters():
            tensors[f"mean.{name}"] = optimizer.state[p]["mean"]
        numbers = {"recipe": state.state_dict()}
        checkpoints.save(Snapshot(step=step, tensors=tensors, numbers=numbers))

    for step in range(first, plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        # The same sequences as in all arms of this seed, in the order of the built-in loop.
        starts = sequence_starts(
            config.seed, step, settings.batch_size, settings.seq_len, len(training)
        )
        loss = loss_of(batch(training, starts, settings.seq_len))
        loss.backward()
        steps_done = step + 1
        is_last = steps_done == plan.steps
        seen = steps_done * plan.tokens_per_step
        row = {"tokens": seen, "step": steps_done}
        if not torch.isfinite(loss):
            return TrainResult(state="diverged", message="non-finite loss", **row)
        optimizer.step()
        optimizer.zero_grad()
        state.advance(plan.tokens_per_step)  # signs, phases and de-oscillation move on
        if steps_done % plan.log_every_steps == 0 or is_last:
            on_metrics({"kind": "train", **row, "loss": loss.item(), "lr": group["lr"]})
        if steps_done % plan.eval_every_steps == 0 or is_last:
            on_metrics({"kind": "eval", **row, "val_loss": evaluate()})
        if is_last:
            break
        if checkpoints.due(seen):
            keep(steps_done)
        if should_stop():
            keep(steps_done)
            return TrainResult(state="interrupted", message="stopped on request", **row)
    return TrainResult(state="finished", tokens=plan.tokens, step=plan.steps)
