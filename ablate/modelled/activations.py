"""The bytes that a built-in model's block keeps for its backward pass, and those alive during that pass.

Counted tensor by tensor from the model's code (``ablate.models.decoder``) and torch's autograd.
Two operations differ by device: attention is written out with its scores on the CPU and fused on a GPU; the
root mean square norm is fused on a GPU only. ``torch.compile`` may keep less than counted here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ablate.run.config import ModelConfig

_BF16, _FP32, _INT64 = 2, 4, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One forward and backward pass on a device: ``sequences`` of ``seq_len`` tokens."""

    model: ModelConfig
    sequences: int
    seq_len: int
    on_gpu: bool
    rows_multiple: int = 1
    """The number of rows of an expert's input is padded to a multiple of this."""

    @property
    def tokens(self) -> int:
        """Tokens of the pass."""
        return self.sequences * self.seq_len

    def rows(self, width: int) -> int:
        """Return the bytes of a bf16 matrix of this width with one row per token."""
        return _BF16 * self.tokens * width

    @property
    def norm(self) -> int:
        """Bytes that a norm keeps in addition to its result."""
        inputs = self.rows(self.model.width)
        if self.model.architecture == "llama" and not self.on_gpu:
            return 4 * inputs  # the input and the normalised input, both in fp32
        return inputs + _FP32 * self.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A moment of a block's backward pass: the bytes of the block alive, and the layer whose GEMMs run.

    ``live`` counts kept tensors that are still needed, and gradients of activations. It excludes the memory
    that the GEMMs of ``layer`` (its name within the block) allocate for ``rows`` rows.
    """

    live: int
    layer: str | None = None
    rows: int = 0


def block_stages(work: Pass) -> tuple[int, list[Stage]]:
    """Return the bytes that a block keeps, and the stages of its backward pass in order."""
    attention_kept, attention_stages = _attention(work)
    ffn_kept, ffn_stages = _feed_forward(work) if work.model.experts is None else _experts(work)
    residual = work.rows(work.model.width)  # the gradient that flows past both halves
    below = attention_kept + residual
    return attention_kept + ffn_kept, [*_above(below, ffn_stages), *_above(residual, attention_stages)]


def norm_backward(work: Pass) -> int:
    """Return the bytes alive in a norm's backward pass: kept tensors, gradients and their products."""
    inputs = work.rows(work.model.width)
    if work.model.architecture == "llama" and not work.on_gpu:
        return work.norm + inputs + 3 * 2 * inputs  # in fp32
    return work.norm + 2 * inputs


def _feed_forward(work: Pass) -> tuple[int, list[Stage]]:
    """SwiGLU or GELU after its norm."""
    width, ffn = work.rows(work.model.width), work.rows(work.model.ffn)
    below = work.norm + width
    kept, stages = _dense(work.model, "ffn", work.tokens, ffn)
    return below + kept, [*_above(below, stages), Stage(live=norm_backward(work))]


def _above(below: int, stages: list[Stage]) -> list[Stage]:
    """Return stages with more bytes alive."""
    return [replace(stage, live=below + stage.live) for stage in stages]


def _dense(model: ModelConfig, name: str, rows: int, ffn: int) -> tuple[int, list[Stage]]:
    """Return the bytes kept in addition to the input, and the stages down to the input's gradient.

    ``ffn``: bytes of a matrix with these rows and the inner width. Kept: the first layer's result and the
    second layer's input; SwiGLU also keeps silu(gate).
    """
    if model.architecture == "gpt":
        return 2 * ffn, [
            Stage(live=2 * ffn, layer=f"{name}.down", rows=rows),
            Stage(live=3 * ffn),  # the first layer's result, and the gradients before and after GELU
            Stage(live=ffn, layer=f"{name}.up", rows=rows),
        ]
    return 4 * ffn, [
        Stage(live=4 * ffn, layer=f"{name}.down", rows=rows),
        Stage(live=6 * ffn),  # gate, up and silu(gate), the product's gradient and those of its two factors
        Stage(live=2 * ffn, layer=f"{name}.gate_up", rows=rows),
    ]


def _experts(work: Pass) -> tuple[int, list[Stage]]:
    """Return the bytes and stages of a mixture of experts and its norm; experts share the tokens evenly."""
    model = work.model
    assert model.experts is not None
    width = work.rows(model.width)
    seen = work.tokens * min(model.experts_per_token, model.experts) // model.experts
    filled = seen + (work.rows_multiple - 1) // 2
    taken, padded = _BF16 * seen * model.width, _BF16 * filled * model.width
    inner = _BF16 * filled * model.ffn
    dense, _ = _dense(model, "", filled, inner)
    # Per expert: its padded input, its result, the weighted result, and the indices of its tokens.
    expert = dense + 2 * padded + taken + 2 * _INT64 * seen
    router = 2 * width + 3 * _FP32 * work.tokens * model.experts  # the router's input and output, in fp32
    below = work.norm + router
    # Gradients of the experts' sum and of their common input; of an expert's input and result.
    flowing = 2 * width + 2 * padded
    stages = [
        stage
        for index in reversed(range(model.experts))
        for stage in _above(
            below + index * expert + flowing, _dense(model, f"ffn.experts.{index}", filled, inner)[1]
        )
    ]
    stages += [Stage(live=below + 3 * width), Stage(live=norm_backward(work))]
    return below + model.experts * expert, stages


def _attention(work: Pass) -> tuple[int, list[Stage]]:
    """Return the bytes that attention and its norm keep, and its stages down to the block's input."""
    model, width = work.model, work.rows(work.model.width)
    head_dim = model.width // model.heads
    kv_heads = model.heads if model.kv_heads is None else model.kv_heads
    keys = work.rows(kv_heads * head_dim)
    all_heads = width + 2 * keys
    rotated = width + keys if model.architecture == "llama" else 0
    below = work.norm + width  # the norm, and the input of q, k and v
    if work.on_gpu:
        # v (and GPT's q and k) are views of the whole result of one layer, which therefore stays in memory.
        core = all_heads + rotated + _FP32 * work.sequences * model.heads * work.seq_len
        backward = core + width + width + 2 * width + 2 * keys  # out and its gradient, dq in fp32, dk, dv
    else:
        core = _operands_on_cpu(work, all_heads, rotated, keys)
        scores = _BF16 * work.sequences * model.heads * work.seq_len**2
        core += scores
        backward = (
            core + 2 * width + 2 * scores
        )  # gradients of out and v, of the probabilities and the scores
    return below + core + width, [
        Stage(live=below + core + width, layer="attention.out", rows=work.tokens),
        Stage(live=below + backward),
        Stage(live=below + 2 * width + 2 * all_heads),  # gradients of q, k, v, joined and rotated back
        Stage(live=below + all_heads, layer="attention.qkv", rows=work.tokens),
        Stage(live=norm_backward(work)),
    ]


def _operands_on_cpu(work: Pass, all_heads: int, rotated: int, keys: int) -> int:
    """Return the bytes of q, k and v kept by batched products: copies, except for a single sequence."""
    width = work.rows(work.model.width)
    if work.sequences > 1:
        return 3 * width
    if keys < width:  # each key and value head is copied for every head that shares it
        return rotated + 2 * width
    return rotated + all_heads
