"""The built-in models as Hugging Face knows them: its configuration, and its names of the weights.

A Llama is a ``LlamaForCausalLM``, with experts a ``MixtralForCausalLM``; a GPT is a ``GPT2LMHeadModel``.
Attention's q, k and v are one matrix here and three there, and so are gate and up; GPT-2's matrices lie
transposed.

How it fails: ``KeyError`` or ``ValueError`` for weights of another model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from ablate.run.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class _Weight:
    """One parameter: our name, the names of its pieces, and how many rows of ours each has (-1: all)."""

    own: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...] = (-1,)
    transposed: bool = False


def to_hugging_face(model: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a built-in model under Hugging Face's names; contiguous copies where cut."""
    renamed: dict[str, Tensor] = {}
    for one in _weights(model):
        tensor = weights[one.own].t() if one.transposed else weights[one.own]
        pieces = [tensor] if one.rows == (-1,) else torch.split(tensor, list(one.rows))
        renamed |= {name: piece.contiguous() for name, piece in zip(one.theirs, pieces, strict=True)}
    return renamed


def from_hugging_face(model: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo ``to_hugging_face``."""
    own = {}
    for one in _weights(model):
        tensor = torch.cat([weights[name] for name in one.theirs])
        own[one.own] = tensor.t() if one.transposed else tensor
    return own


def hugging_face_config(model: ModelConfig, *, vocab_size: int, seq_len: int, dtype: str) -> dict[str, Any]:
    """Return the content of the ``config.json`` that goes with the weights, whose type is ``dtype``."""
    common = {
        "vocab_size": vocab_size,
        "tie_word_embeddings": model.tied_head,
        "initializer_range": model.init_std,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
    }
    if model.architecture == "gpt":
        return common | {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_embd": model.width,
            "n_layer": model.layers,
            "n_head": model.heads,
            "n_inner": model.ffn,
            "n_positions": seq_len,
            "layer_norm_epsilon": model.norm_eps,
            "activation_function": "gelu_new",
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        }
    llama = common | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.width,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads or model.heads,
        "head_dim": model.width // model.heads,
        "hidden_act": "silu",
        "max_position_embeddings": seq_len,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_base,
    }
    if model.experts is None:
        return llama | {"attention_bias": False, "mlp_bias": False}
    return llama | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": model.experts,
        "num_experts_per_tok": min(model.experts_per_token, model.experts),
        "router_aux_loss_coef": model.balance_loss,
        "sliding_window": None,
    }


def _weights(model: ModelConfig) -> Iterator[_Weight]:
    if model.architecture == "gpt":
        yield from _gpt(model)
        return
    yield _Weight(own="embedding", theirs=("model.embed_tokens.weight",))
    head_dim = model.width // model.heads
    keys = (model.kv_heads or model.heads) * head_dim
    for index in range(model.layers):
        own, theirs = f"blocks.{index}", f"model.layers.{index}"
        yield _Weight(own=f"{own}.attention_norm.weight", theirs=(f"{theirs}.input_layernorm.weight",))
        qkv = tuple(f"{theirs}.self_attn.{part}_proj.weight" for part in "qkv")
        yield _Weight(own=f"{own}.attention.qkv.weight", theirs=qkv, rows=(model.width, keys, keys))
        yield _Weight(own=f"{own}.attention.out.weight", theirs=(f"{theirs}.self_attn.o_proj.weight",))
        yield _Weight(own=f"{own}.ffn_norm.weight", theirs=(f"{theirs}.post_attention_layernorm.weight",))
        if model.experts is None:
            names = [f"{theirs}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
            yield from _swiglu(f"{own}.ffn", names, model.ffn)
            continue
        mixture = f"{theirs}.block_sparse_moe"
        yield _Weight(own=f"{own}.ffn.router", theirs=(f"{mixture}.gate.weight",))
        for expert in range(model.experts):
            names = [f"{mixture}.experts.{expert}.{part}.weight" for part in ("w1", "w3", "w2")]
            yield from _swiglu(f"{own}.ffn.experts.{expert}", names, model.ffn)
    yield _Weight(own="norm.weight", theirs=("model.norm.weight",))
    if not model.tied_head:
        yield _Weight(own="head.weight", theirs=("lm_head.weight",))


def _swiglu(own: str, theirs: list[str], inner: int) -> Iterator[_Weight]:
    gate, up, down = theirs
    yield _Weight(own=f"{own}.gate_up.weight", theirs=(gate, up), rows=(inner, inner))
    yield _Weight(own=f"{own}.down.weight", theirs=(down,))


def _gpt(model: ModelConfig) -> Iterator[_Weight]:
    yield _Weight(own="embedding", theirs=("transformer.wte.weight",))
    yield _Weight(own="positions", theirs=("transformer.wpe.weight",))
    parts = {
        "attention_norm": "ln_1", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj",
        "ffn_norm": "ln_2", "ffn.up": "mlp.c_fc", "ffn.down": "mlp.c_proj",
    }  # fmt: skip
    modules = {"norm": "transformer.ln_f"} | {
        f"blocks.{index}.{own}": f"transformer.h.{index}.{theirs}"
        for index in range(model.layers)
        for own, theirs in parts.items()
    }
    for own, theirs in modules.items():
        is_matrix = not own.endswith("norm")
        yield _Weight(own=f"{own}.weight", theirs=(f"{theirs}.weight",), transposed=is_matrix)
        yield _Weight(own=f"{own}.bias", theirs=(f"{theirs}.bias",))
    if not model.tied_head:
        yield _Weight(own="head.weight", theirs=("lm_head.weight",))
