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

    from ablate.run.config import ModelConfig, RunConfig

# Our name of a parameter → Hugging Face's names of its pieces; {n} counts blocks, {e} experts.
_LLAMA = {
    "embedding": ("model.embed_tokens.weight",),
    "norm.weight": ("model.norm.weight",),
    "blocks.{n}.attention_norm.weight": ("model.layers.{n}.input_layernorm.weight",),
    "blocks.{n}.attention.qkv.weight": tuple(
        f"model.layers.{{n}}.self_attn.{x}_proj.weight" for x in "qkv"
    ),
    "blocks.{n}.attention.out.weight": ("model.layers.{n}.self_attn.o_proj.weight",),
    "blocks.{n}.ffn_norm.weight": ("model.layers.{n}.post_attention_layernorm.weight",),
}
_DENSE = {
    "blocks.{n}.ffn.gate_up.weight": (
        "model.layers.{n}.mlp.gate_proj.weight", "model.layers.{n}.mlp.up_proj.weight",
    ),
    "blocks.{n}.ffn.down.weight": ("model.layers.{n}.mlp.down_proj.weight",),
}  # fmt: skip
_EXPERTS = {
    "blocks.{n}.ffn.experts.{e}.gate_up.weight": (
        "model.layers.{n}.block_sparse_moe.experts.{e}.w1.weight",
        "model.layers.{n}.block_sparse_moe.experts.{e}.w3.weight",
    ),
    "blocks.{n}.ffn.experts.{e}.down.weight": (
        "model.layers.{n}.block_sparse_moe.experts.{e}.w2.weight",
    ),
    "blocks.{n}.ffn.router": ("model.layers.{n}.block_sparse_moe.gate.weight",),
}
_GPT = {
    "embedding": ("transformer.wte.weight",),
    "positions": ("transformer.wpe.weight",),
    **{
        f"{module}.{kind}": (f"transformer.{hf_module}.{kind}",)
        for kind in ("weight", "bias")
        for module, hf_module in (
            ("norm", "ln_f"),
            ("blocks.{n}.attention_norm", "h.{n}.ln_1"),
            ("blocks.{n}.attention.qkv", "h.{n}.attn.c_attn"),
            ("blocks.{n}.attention.out", "h.{n}.attn.c_proj"),
            ("blocks.{n}.ffn_norm", "h.{n}.ln_2"),
            ("blocks.{n}.ffn.up", "h.{n}.mlp.c_fc"),
            ("blocks.{n}.ffn.down", "h.{n}.mlp.c_proj"),
        )
    },
}


def to_hugging_face(
    model: ModelConfig, weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Rename a built-in model's weights to Hugging Face's names; pieces of a matrix are contiguous copies."""
    keys = (model.kv_heads or model.heads) * (model.width // model.heads)
    renamed: dict[str, Tensor] = {}
    for name, hf_names in _names(model).items():
        tensor = _turned(model, name, weights[name])
        if len(hf_names) == 3:
            pieces = torch.split(tensor, [model.width, keys, keys])
        else:
            pieces = torch.chunk(tensor, len(hf_names))
        for hf_name, piece in zip(hf_names, pieces, strict=True):
            renamed[hf_name] = piece.contiguous()
    return renamed


def from_hugging_face(
    model: ModelConfig, weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Undo ``to_hugging_face``; ``KeyError`` for a missing weight."""
    renamed: dict[str, Tensor] = {}
    for name, hf_names in _names(model).items():
        whole = torch.cat([weights[hf_name] for hf_name in hf_names])
        renamed[name] = _turned(model, name, whole)
    return renamed


def hugging_face_config(run: RunConfig, dtype: str) -> dict[str, Any]:
    """Make the content of ``config.json`` for a run's saved weights of this ``dtype``."""
    model = run.model
    seq_len = run.training.seq_len
    common = {
        "vocab_size": run.vocab_size,
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
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
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
    table = _LLAMA | (_EXPERTS if model.experts else _DENSE)
    if model.architecture == "gpt":
        table = {**_GPT}
    if not model.tied_head:
        table = table | {"head.weight": ("lm_head.weight",)}
    return {
        name.format(n=n, e=e): [hf_name.format(n=n, e=e) for hf_name in hf_names]
        for name, hf_names in table.items()
        for n in range(model.layers)
        for e in range(model.experts or 1)
    }


def _turned(model: ModelConfig, name: str, tensor: Tensor) -> Tensor:
    is_gpt = model.architecture == "gpt"
    if is_gpt and name.startswith("blocks.") and tensor.dim() == 2:
        return tensor.t()
    return tensor
