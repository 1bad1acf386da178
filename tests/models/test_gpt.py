"""The GPT architecture against Hugging Face's GPT-2 with the same weights, and in training."""

import pytest
import torch
from pydantic import TypeAdapter

from ablate.backends.select import Selection
from ablate.layers.state import RecipeState
from ablate.models.decoder import Decoder
from ablate.recipes import Recipe, RecipeSpec
from ablate.run.config import ModelConfig
from ablate.train import train

SHAPE = ModelConfig(architecture="gpt", width=64, layers=2, heads=4, ffn=256)


def test_logits_and_gradients_are_those_of_gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=96, n_positions=32, bos_token_id=None, eos_token_id=None,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config)
    state = RecipeState(recipe=Recipe(), backend=Selection("emulated"), seed=0)
    ours = Decoder(SHAPE, 96, 32, state)
    ours.initialise(torch.Generator().manual_seed(0))
    given = theirs.state_dict()
    names = {"ln_1": "attention_norm", "attn.c_attn": "attention.qkv", "attn.c_proj": "attention.out",
             "ln_2": "ffn_norm", "mlp.c_fc": "ffn.up", "mlp.c_proj": "ffn.down"}  # fmt: skip
    with torch.no_grad():
        own = dict(ours.named_parameters())
        for name, parameter in own.items():  # biases that are not nought, so that they count
            if name.endswith("bias"):
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
        given["transformer.wte.weight"].copy_(own["embedding"])
        given["transformer.wpe.weight"].copy_(own["positions"])
        given["transformer.ln_f.weight"].copy_(own["norm.weight"])
        given["transformer.ln_f.bias"].copy_(own["norm.bias"])
        for block in range(2):
            for their_name, our_name in names.items():
                for kind in ("weight", "bias"):
                    value = own[f"blocks.{block}.{our_name}.{kind}"]
                    target = given[f"transformer.h.{block}.{their_name}.{kind}"]
                    target.copy_(value.t() if value.dim() == 2 else value)
    tokens = torch.randint(0, 96, (2, 32), generator=torch.Generator().manual_seed(1))
    mine, reference = ours(tokens).float(), theirs(tokens, use_cache=False).logits
    torch.testing.assert_close(mine, reference, rtol=0.05, atol=0.02)  # bf16 against fp32
    for logits in (mine, reference):
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    torch.testing.assert_close(ours.positions.grad, theirs.transformer.wpe.weight.grad, rtol=0.05, atol=1e-4)


def test_it_learns_with_all_gemms_in_fp4(make_config, tokens):
    recipe = TypeAdapter(RecipeSpec).validate_python(
        {"gemms": ["fprop", "dgrad", "wgrad"], "stabiliser": "dht"}
    )
    rows = []
    train(make_config(recipe, model={"architecture": "gpt", "ffn": 256}), rows.append, tokens=tokens)
    losses = [row["val_loss"] for row in rows if row["kind"] == "eval"]
    assert losses[-1] < losses[0] - 0.3
