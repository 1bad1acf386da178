"""The role of a linear layer, by its dotted name: what it is for, whichever model holds it.

Known are the built-in models, Hugging Face's, and others with usual names: the last word decides
(``q_proj``, ``c_fc``), where it says too little the parts before it (``attn.c_proj``, ``mlp.c_proj``), or the
layers beside it: ``w1`` beside ``w3`` is a gate and alone goes up, ``gate`` without ``down`` is a router.

One matrix for q, k and v has the role ``attention.qkv``; one for gate and up has both roles. The layers of
experts are ``experts``, not ``ffn``, but shared experts, which every token passes, are ``ffn``. A role with a
part is named by its first word, too: ``attention`` is all of attention. Embeddings and most routers are no
linear layers and follow no recipe. A layer whose name says nothing has no role.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

_LAST_WORDS = {
    "attention.qkv": "q k v kv qkv q_proj k_proj v_proj qkv_proj kv_proj q_a_proj q_b_proj kv_b_proj "
    "kv_a_proj_with_mqa wq wk wv wkv wqkv wq_a wq_b wkv_a wkv_b c_attn q_attn query key value "
    "query_key_value to_q to_k to_v to_qkv q_lin k_lin v_lin att_proj linear_qkv in_proj_qkvz",
    "attention.out": "o o_proj out_lin to_out attn_out linear_proj",
    "ffn.gate_up": "gate_up gate_up_proj w12 w13 ff_proj input_linear",
    "ffn.gate": "gate_proj wi_0 w1",
    "ffn.up": "up up_proj w3 fc1 fc_in c_fc dense_h_to_4h wi wi_1 lin1 linear1 linear_fc1 intermediate",
    "ffn.down": "down down_proj w2 fc2 fc_out dense_4h_to_h lin2 linear2 linear_fc2 ff_out output_linear "
    "output",
    "router": "router wg shared_expert_gate",
}
_BY_LAST = {word: role for role, words in _LAST_WORDS.items() for word in words.split()}
_INTO = {"attention": "attention.qkv", "mamba": "mamba.in", "ffn": "ffn.up"}
_OUT_OF = {"attention": "attention.out", "mamba": "mamba.out", "ffn": "ffn.down"}
_BY_PART = {
    "in_proj": _INTO,
    **dict.fromkeys(
        ("out_proj", "out", "proj", "c_proj", "dense", "wo", "output"), _OUT_OF
    ),
}
_BY_SIGN = {"mtp": "mtp", "embed": "embedding", "latent": "latent", "router": "router"}
_PARTS = {
    "attention": ("attn", "attention"),
    "ffn": (
        "mlp",
        "ffn",
        "feed_forward",
        "feedforward",
        "moe",
        "shared_expert",
        "relu",
    ),
    "mamba": ("mamba", "ssm", "mixer"),
}


def words_of(role: str | None) -> set[str]:
    """Return the roles by which a rule names a layer of this role: ``ffn.gate_up`` is also gate, and up."""
    whole, dot, parts = (role or "").partition(".")
    if dot:
        return {whole, *(f"{whole}.{part}" for part in parts.split("_"))}
    return {whole}


def role_of(name: str, names: Collection[str]) -> str | None:
    """Return the role of a layer that is no head; ``names``: those of all layers of the model."""
    parts = [part for part in name.lower().split(".") if not part.isdecimal()]
    for sign, role_of_sign in _BY_SIGN.items():
        if any(sign in part for part in parts):
            return role_of_sign
    *before, last = parts or [""]
    # BERT's
    if last == "dense" and before and before[-1] in ("intermediate", "output"):
        *before, last = before
    inside = next(filter(None, map(_kind, reversed(before))), "")
    role: str | None = _BY_PART.get(last, {}).get(inside) or _BY_LAST.get(last)
    if last == "w1" and not _beside(name, "w1", ("w3",), names):
        role = "ffn.up"
    elif last == "gate" and inside != "attention":
        if _beside(name, "gate", ("down", "down_proj"), names):
            role = "ffn.gate"
        else:
            role = "router"
    elif (
        role is None and _kind(last) == "ffn" and len(name.split(".")) > len(parts) + 1
    ):
        # a Sequential
        parent, _, last_part = name.rpartition(".")
        number = int(last_part)
        has_earlier = any(f"{parent}.{index}" in names for index in range(number))
        has_later = any(
            f"{parent}.{index}" in names for index in range(number + 1, number + 5)
        )
        if has_earlier != has_later:
            role = "ffn.up" if has_later else "ffn.down"
    if any("expert" in part and "shared" not in part for part in before):
        return (role or "").replace("ffn", "experts") or "experts"
    if role and {role.partition(".")[0], inside} == {"attention", "ffn"}:
        return None
    return role


def _kind(part: str) -> str:
    """Return what a part of a name is about; empty if it does not say."""
    return next(
        (kind for kind, signs in _PARTS.items() if any(sign in part for sign in signs)),
        "",
    )


def _beside(
    name: str, word: str, others: Collection[str], names: Collection[str]
) -> bool:
    """Whether the model has a layer beside this one whose name has another word instead."""
    return any(other.join(name.rsplit(word, 1)) in names for other in others)
