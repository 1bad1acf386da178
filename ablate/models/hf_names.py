"""The built-in models as Hugging Face knows them: its configuration, and its names of the weights.

A Llama is a ``LlamaForCausalLM``, with experts a ``MixtralForCausalLM``; a GPT is a ``GPT2LMHeadModel``.
Attention's q, k and v are one matrix here and three in a Hugging Face Llama; gate and up are one here and two
there. GPT-2's matrices are transposed.

How it fails: ``KeyError`` or ``ValueError`` for weights of another model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ablate.run.config import ModelConfig

# Our name within a block → Hugging Face's names of its pieces.
_LLAMA = {
    "attention_norm": ("input_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.o_proj",),
    "ffn_norm": ("post_attention_layernorm",),
}
_DENSE = {"ffn.gate_up": ("mlp.gate_proj", "mlp.up_proj"), "ffn.down": ("mlp.down_proj",)}
_GPT = {
    "attention_norm": ("ln_1",),
    "attention.qkv": ("attn.c_attn",),
    "attention.out": ("attn.c_proj",),
    "ffn_norm": ("ln_2",),
    "ffn.up": ("mlp.c_fc",),
    "ffn.down": ("mlp.c_proj",),
}


def to_hugging_face(model: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename a built-in model's weights to Hugging Face's names; pieces of a matrix are contiguous copies."""
    keys = (model.kv_heads or model.heads) * (model.width // model.heads)
    renamed: dict[str, Tensor] = {}
    for own, theirs in _names(model).items():
        tensor = _turned(model, own, weights[own])
        rows = [model.width, keys, keys] if len(theirs) == 3 else [len(tensor) // len(theirs)] * len(theirs)
        pieces = torch.split(tensor, rows)
        renamed |= {name: piece.contiguous() for name, piece in zip(theirs, pieces, strict=True)}
    return renamed


def from_hugging_face(model: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo ``to_hugging_face``; ``KeyError`` for a missing weight."""
    return {
        own: _turned(model, own, torch.cat([weights[name] for name in theirs]))
        for own, theirs in _names(model).items()
    }


def hugging_face_config(model: ModelConfig, *, vocab_size: int, seq_len: int, dtype: str) -> dict[str, Any]:
    """Make the content of ``config.json`` for saved weights of this ``dtype``."""
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


def _names(model: ModelConfig) -> dict[str, list[str]]:
    """Our name of each parameter → Hugging Face's names of its pieces."""
    is_gpt = model.architecture == "gpt"
    block: dict[str, tuple[str, ...]] = {**(_GPT if is_gpt else _LLAMA)}
    if not is_gpt and model.experts is None:
        block |= _DENSE
    for index in range(model.experts or 0):
        own, theirs = f"ffn.experts.{index}", f"block_sparse_moe.experts.{index}"
        block |= {f"{own}.gate_up": (f"{theirs}.w1", f"{theirs}.w3"), f"{own}.down": (f"{theirs}.w2",)}
    top, blocks = ("transformer", "transformer.h") if is_gpt else ("model", "model.layers")
    embedding, norm = ("wte", "ln_f") if is_gpt else ("embed_tokens", "norm")
    found = {"embedding": [f"{top}.{embedding}.weight"]}
    if is_gpt:
        found["positions"] = [f"{top}.wpe.weight"]
    for kind in ("weight", "bias") if is_gpt else ("weight",):
        found[f"norm.{kind}"] = [f"{top}.{norm}.{kind}"]
        for index in range(model.layers):
            for name, pieces in block.items():
                names = [f"{blocks}.{index}.{piece}.{kind}" for piece in pieces]
                found[f"blocks.{index}.{name}.{kind}"] = names
    for index in range(model.layers if model.experts else 0):
        found[f"blocks.{index}.ffn.router"] = [f"{blocks}.{index}.block_sparse_moe.gate.weight"]
    return found if model.tied_head else found | {"head.weight": ["lm_head.weight"]}


def _turned(model: ModelConfig, own: str, tensor: Tensor) -> Tensor:
    is_turned = model.architecture == "gpt" and own.startswith("blocks.") and tensor.dim() == 2
    return tensor.t() if is_turned else tensor
