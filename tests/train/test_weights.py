"""Final weights in Hugging Face's layout: its classes load them and compute what ours do."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from ablate.check.training import config_of
from ablate.recipes import Recipe, read_recipe
from ablate.run.config import ModelConfig
from ablate.train.group import ALONE
from ablate.train.snapshot import load_weights, save_weights
from ablate.train.step import assemble
from tests.tensors import assert_same

TOKENS = torch.randint(0, 96, (1, 65), generator=torch.Generator().manual_seed(0))
SMALL = {"width": 64, "layers": 2, "heads": 4, "ffn": 96, "init_std": 0.1}
MODELS = {
    "llama": ModelConfig(**SMALL, kv_heads=2, rope_base=500.0),
    "mixtral": ModelConfig(**SMALL, experts=4, tied_head=False),
    "gpt": ModelConfig(**SMALL, architecture="gpt"),
}


def saved(config, folder):
    """Build a run's module, with gains and biases that count, and keep its weights; return the module."""
    module = assemble(config, "cpu").module.eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    save_weights(module, ALONE, config, folder)
    assert [*folder.parent.glob(".*")] == []
    for path in folder.iterdir():
        assert path.stat().st_mode & 0o777 == 0o666 & folder.stat().st_mode
    return module


def in_transformers(folder):
    transformers = pytest.importorskip("transformers")
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(found.values()), found
    return model.eval()


def computed(module, table, tokens):
    """The logits and the gradient of the embedding, which has passed all layers."""
    found = module(tokens[:, :-1])
    logits = getattr(found, "logits", found).float()
    loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    return logits, torch.autograd.grad(loss, table)[0].float()


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same_forward_and_backward(name, tmp_path):
    config = config_of(MODELS[name], Recipe(), "auto", 96, seq_len=64)
    folder = tmp_path / "weights"
    trained = saved(config, folder)
    loaded = in_transformers(folder)
    content = json.loads((folder / "config.json").read_text())
    assert content["architectures"] == [type(loaded).__name__]
    assert next(loaded.parameters()).dtype == torch.float32
    table = loaded.to(torch.bfloat16).get_input_embeddings().weight
    expected = computed(trained, trained.embedding, TOKENS)
    same = computed(loaded, table, TOKENS)
    # They differ by the order of roundings to bf16 alone. Another text tells how far two results can be.
    others = computed(loaded, table, TOKENS.flip(-1))
    for a, b, other in zip(expected, same, others, strict=True):
        assert (a - b).abs().mean() < 0.03 * (a - other).abs().mean()
    assert_same(load_weights(config, folder), dict(trained.named_parameters()))


def test_scales_are_no_weights(tmp_path):
    recipe = read_recipe("te-hybrid-fp8-delayed")
    saved(config_of(MODELS["llama"], recipe, "auto", 96), tmp_path / "weights")
    weights = load_file(tmp_path / "weights" / "model.safetensors")
    assert not any("amax" in name for name in weights)


def test_a_hugging_face_model_is_saved_by_its_own_class(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64}
    outline = transformers.GPT2Config(vocab_size=96, **sizes)
    outline.save_pretrained(tmp_path / "gpt2")
    model = ModelConfig(hf=str(tmp_path / "gpt2"), allow=["*"])
    config = config_of(model, Recipe(), "auto", 96, seq_len=64, master_weights="bf16")
    trained = saved(config, tmp_path / "weights")
    loaded = in_transformers(tmp_path / "weights")
    assert next(loaded.parameters()).dtype == torch.bfloat16
    expected = trained.state_dict()
    for name, tensor in loaded.state_dict().items():
        # of GPT-2's Conv1D
        assert any(torch.equal(one, expected[name]) for one in (tensor, tensor.t()))


def test_what_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    config = config_of(MODELS["llama"], Recipe(), "auto", 96)
    trainee = assemble(config, "cpu")

    def full(*_, **__):
        from safetensors import SafetensorError

        raise SafetensorError("I/O error: No space left on device (os error 28)")

    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "of an attempt before").touch()
    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="No space left") as caught:
        save_weights(trainee.module, ALONE, config, tmp_path / "weights")
    assert caught.value.errno == 28
    names = [path.name for path in tmp_path.rglob("*")]
    assert names == ["weights", "of an attempt before"]
