"""The GPT architecture against Hugging Face's GPT-2 with the same weights."""

import pytest
import torch

from ablate.backends.select import Selection
from ablate.layers.state import RecipeState
from ablate.models.decoder import Decoder
from ablate.models.hf_names import hugging_face_config, to_hugging_face
from ablate.recipes import Recipe
from ablate.run.config import ModelConfig

SHAPE = ModelConfig(architecture="gpt", width=64, layers=2, heads=4, ffn=256)


def test_logits_and_gradients_are_those_of_gpt2():
    transformers = pytest.importorskip("transformers")
    ours = Decoder(SHAPE, 96, 32, RecipeState(recipe=Recipe(), backend=Selection("emulated"), seed=0))
    ours.initialise(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, parameter in ours.named_parameters():  # biases that are not nought, so that they count
            if name.endswith("bias"):
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    about = hugging_face_config(SHAPE, vocab_size=96, seq_len=32, dtype="float32")
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**about))
    theirs.load_state_dict(to_hugging_face(SHAPE, ours.state_dict()), strict=False)
    tokens = torch.randint(0, 96, (2, 32), generator=torch.Generator().manual_seed(1))
    mine, reference = ours(tokens).float(), theirs(tokens, use_cache=False).logits
    torch.testing.assert_close(mine, reference, rtol=0.05, atol=0.02)  # bf16 against fp32
    for logits in (mine, reference):
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    torch.testing.assert_close(ours.positions.grad, theirs.transformer.wpe.weight.grad, rtol=0.05, atol=1e-4)
