"""The role of a layer, from its name and those beside it."""

import pytest

from ablate.recipes.place import places

LAYERS = {
    "attention.qkv": "h.0.attn.c_attn h.0.self_attention.query_key_value h.0.attn.Wqkv layers.0.attention.wq "
    "layers.0.self_attn.kv_a_proj_with_mqa encoder.0.attention.self.key decoder.layers.0.self_attn.in_proj",
    "attention.out": "h.0.attn.c_proj h.0.self_attention.dense layers.0.attention.wo blocks.0.attn.proj "
    "layers.0.self_attn.out_proj encoder.0.attention.output.dense layers.0.mixer.o_proj",
    "ffn.up": "h.0.mlp.c_fc layers.0.fc1 layers.0.feed_forward.w3 layers.0.mlp.shared_experts.up_proj "
    "encoder.0.intermediate.dense layers.0.ffn.w1",
    "ffn.gate": "layers.0.feed_forward.w1 layers.0.mlp.gate_proj block.0.ffn.gate",
    "ffn.gate_up": "blocks.0.ffn.gate_up layers.0.mlp.gate_up_proj",
    "ffn.down": "h.0.mlp.c_proj layers.0.fc2 layers.0.feed_forward.w2 encoder.0.output.dense "
    "block.0.ffn.down layer.0.DenseReluDense.wo",
    "experts.gate": "layers.0.block_sparse_moe.experts.3.w1 layers.0.moe.experts.w1.5",
    "experts.up": "layers.0.block_sparse_moe.experts.3.w3 layers.0.moe.experts.w3.5",
    "experts.down": "layers.0.moe.experts.w2.5 layers.0.mlp.experts.down_proj.1",
    "experts.gate_up": "blocks.0.ffn.experts.3.gate_up layers.0.mlp.experts.gate_up_proj.1",
    "experts": "layers.0.mlp.experts.1.mixing",
    "router": "layers.0.mlp.router layers.0.block_sparse_moe.gate layers.0.mlp.router.classifier",
    "mamba.in": "backbone.layers.0.mixer.in_proj",
    "mamba.out": "backbone.layers.0.mixer.out_proj layers.0.mamba.out_proj",
    "latent": "layers.0.mlp.fc1_latent_proj",
    "mtp": "mtp.layers.0.self_attn.q_proj",
    "embedding": "patch_embed.proj",
    "head": "lm_head",
    None: "layers.0.mixing layers.0.feed_forward.key layers.0.dense layers.0.mixer.x_proj layers.0.attn.gate",
}


def test_a_role_is_in_the_name_or_in_the_layers_beside():
    layers = places(
        [name for names in LAYERS.values() for name in names.split()], heads=["lm_head"]
    )
    by_role = {
        role: " ".join(name for name in layers if layers[name].role == role)
        for role in LAYERS
    }
    assert by_role == LAYERS


@pytest.mark.parametrize(
    ("names", "roles"),
    [
        ("blocks.0.mlp.0 blocks.0.mlp.2", ["ffn.up", "ffn.down"]),
        ("blocks.0.mlp.0 blocks.0.mlp.2 blocks.0.mlp.4", ["ffn.up", None, "ffn.down"]),
        ("mlp.0 mlp.1 mlp.2", [None] * 3),  # the blocks of a model
        ("0 2", [None] * 2),
    ],
)
def test_numbers_in_a_feed_forward_network_go_up_and_then_down(names, roles):
    assert [place.role for place in places(names.split()).values()] == roles
