"""A run's final weights as a folder that Hugging Face's libraries load, and the way back into a model.

::

    weights/model.safetensors                      in the type of the master weights
            config.json                            not for a model from the user's function
            tokenizer.json, tokenizer_config.json  of a BPE of the study's own

The folder appears whole or not at all. Built-in models have Hugging Face's names (``hf_names``), models from
there are saved by their own ``save_pretrained``, a user's function keeps its own names.

How it fails: ``OSError`` where it cannot be written, such as on a full disk; nothing is left then.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import torch

from ablate.base.files import write_json_atomic
from ablate.data.tokenise import END_OF_TEXT
from ablate.layers.linear import BUFFERS_OF_SCALES, is_sharded
from ablate.models.hf_names import from_hugging_face, hugging_face_config, to_hugging_face
from ablate.store.checkpoints import as_os_error, write_tensors
from ablate.train.snapshot import model_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from ablate.run.config import RunConfig
    from ablate.train.loop import Trainee

_FILE = "model.safetensors"


def save_weights(trainee: Trainee, config: RunConfig, folder: Path, *, tokenizer: Path | None = None) -> None:
    """Write the weights of a trained model; each process of its group calls this, and the first one writes.

    ``tokenizer``: the folder of the run's tokens.

    Raises:
        OSError: they could not be written.
    """
    weights = {}
    for name, tensor in model_tensors(trainee.network.module):
        if name.rpartition(".")[2] in BUFFERS_OF_SCALES:
            continue
        whole = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
        if trainee.group.rank == 0:
            weights[name] = whole.detach().cpu()
    if trainee.group.rank != 0:
        return
    for left in folder.parent.glob(f".{folder.name}.*"):  # by an attempt that was killed
        shutil.rmtree(left, ignore_errors=True)
    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        draft.mkdir(parents=True)
        with as_os_error():
            if config.model.hf is not None:
                _save_pretrained(trainee.network.module, weights, draft)
            else:
                if config.model.is_built_in:
                    weights = to_hugging_face(config.model, weights)
                    content = hugging_face_config(
                        config.model, vocab_size=config.vocab_size, seq_len=config.training.seq_len,
                        dtype=str(next(iter(weights.values())).dtype).removeprefix("torch."),
                    )  # fmt: skip
                    write_json_atomic(draft / "config.json", content)
                write_tensors(draft / _FILE, weights, {"format": "pt"})
        if config.data.tokenizer == "bpe" and tokenizer is not None:
            shutil.copyfile(tokenizer / "tokenizer.json", draft / "tokenizer.json")
            words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
            write_json_atomic(draft / "tokenizer_config.json", words)
        for path in draft.iterdir():
            path.chmod(
                draft.stat().st_mode & 0o666
            )  # as the umask has it: safetensors lets only the owner read
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was killed before its result
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _save_pretrained(module: Any, weights: dict[str, Tensor], folder: Path) -> None:
    """Save by the class of the model as it was before its layers were taken over."""
    from transformers import AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    dtype = next(iter(weights.values())).dtype
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(module.config, dtype=dtype)
    for name, layer in plain.named_modules():
        if isinstance(layer, Conv1D):
            weights[f"{name}.weight"] = weights[f"{name}.weight"].t().contiguous()
    plain.save_pretrained(folder, state_dict=weights)


def load_weights(config: RunConfig, folder: Path) -> dict[str, Tensor]:
    """Return the weights in a folder under the names of the module, which is not Hugging Face's.

    Raises:
        OSError: they are damaged.
        KeyError: they are another model's.
    """
    from safetensors.torch import load_file

    with as_os_error():
        weights = load_file(folder / _FILE)
    return from_hugging_face(config.model, weights) if config.model.is_built_in else weights
