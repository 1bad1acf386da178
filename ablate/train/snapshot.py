"""Save and restore everything that a run's future depends on, as named tensors and plain numbers.

The random streams are counted from the seed, the step and the call, and the data order from the seed and the
step, so the step describes them completely. The rest: weights, buffers (the largest magnitudes for delayed
scales), the optimizer's moments, the sums of de-oscillation, and the trainer's own counters.

With several devices each process saves and restores its own rows; their number may have changed.

How it fails: a snapshot of another model raises a ``ValueError`` that names the mismatch; final weights that
cannot be written, such as on a full disk, are an ``OSError``, and nothing is left of them.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ablate.base.files import write_json_atomic
from ablate.layers.delayed import BUFFERS_OF_SCALES
from ablate.layers.linear import is_sharded, local_rows
from ablate.store.checkpoints import (
    Snapshot,
    StoredTensor,
    as_os_error,
    read_rows,
    write_tensors,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from torch import Tensor, nn

    from ablate.layers.deoscillation import Deoscillation
    from ablate.run.config import RunConfig
    from ablate.train.group import Group

_MODEL = "model."
_SUMS = "deoscillation."
_FILE = "model.safetensors"


class Checkpoints(Protocol):
    """Where a trainer's snapshots are saved and loaded."""

    def load(self) -> Snapshot | None:
        """Load the snapshot to resume from, with whole tensors; None if there is none."""

    def due(self, tokens: int) -> bool:
        """Whether a snapshot is due after so many training tokens."""

    def save(self, snapshot: Snapshot) -> None:
        """Save a snapshot; every earlier row of metrics has already been passed on."""


def take_snapshot(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    deoscillation: Deoscillation | None,
    *,
    step: int,
    numbers: dict[str, Any],
) -> Snapshot:
    """Collect the current state; its tensors are in use and must be written before the next step."""
    tensors = {f"{_MODEL}{name}": tensor for name, tensor in model_tensors(model)}
    if deoscillation is not None and deoscillation.followed is not None:
        for name, sums in deoscillation.sums.items():
            tensors[f"{_SUMS}{name}"] = sums
        numbers = {**numbers, "deoscillation_steps": deoscillation.steps}
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            tensors[f"optimizer.{index}.{key}"] = value
    sharded = frozenset(name for name in tensors if is_sharded(tensors[name]))
    for name, tensor in tensors.items():
        tensors[name] = local_rows(tensor.detach())[0]
    return Snapshot(step=step, tensors=tensors, numbers=numbers, sharded=sharded)


def restore_snapshot(
    snapshot: Snapshot,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    deoscillation: Deoscillation | None,
) -> None:
    """Restore a model, its optimizer and its window of de-oscillation; set the state's tokens first.

    Raises:
        ValueError: the snapshot belongs to another model or another recipe.
    """
    restore_model(snapshot, model)
    parameters = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    state: dict[int, dict[str, Tensor]] = {}
    for name, source in snapshot.tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".", 2)
            target = parameters[int(index)].detach()
            if tuple(source.shape) == tuple(target.shape) and is_sharded(target):
                restored = torch.empty_like(target)
                _copy(source, restored, name)
            else:
                restored = read_rows(source, slice(None))
            state.setdefault(int(index), {})[key] = restored
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
    steps = snapshot.numbers.get("deoscillation_steps", 0)
    sums = {} if deoscillation is None else deoscillation.resume(steps)
    _fill(snapshot, _SUMS, sums.items(), of="recipe")


def restore_model(snapshot: Snapshot, model: nn.Module) -> None:
    """Restore only a model's weights and buffers; raises as ``restore_snapshot``."""
    _fill(snapshot, _MODEL, model_tensors(model), of="model")


@torch.no_grad()
def _fill(
    snapshot: Snapshot, prefix: str, targets: Iterable[tuple[str, Tensor]], *, of: str
) -> None:
    expected = {f"{prefix}{name}": tensor for name, tensor in targets}
    saved = {name for name in snapshot.tensors if name.startswith(prefix)}
    unmatched = sorted(expected.keys() ^ saved)
    if unmatched:
        raise ValueError(
            f"a snapshot of another {of}: {unmatched[0]} is in one of them alone"
        )
    for name, tensor in expected.items():
        if tuple(tensor.shape) != tuple(snapshot.tensors[name].shape):
            raise ValueError(f"a snapshot of another {of}: {name} differs in shape")
        _copy(snapshot.tensors[name], tensor, name)


def _copy(source: Tensor | StoredTensor, target: Tensor, name: str) -> None:
    local, rows = local_rows(target)
    values = read_rows(source, rows)
    if values.dtype != local.dtype:
        raise ValueError(f"a snapshot of another model: {name} differs in type")
    local.copy_(values)


def model_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers, shared memory once (a tied head shares the embedding's)."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        memory = local_rows(tensor)[0].data_ptr()
        if memory not in seen or not tensor.numel():
            seen.add(memory)
            yield name, tensor


def save_weights(
    model: nn.Module,
    group: Group,
    config: RunConfig,
    folder: Path,
    *,
    tokenizer: Path | None = None,
) -> None:
    """Write a model's final weights as a folder that Hugging Face's libraries load, whole or not at all.

    Each process of the group calls this, and the first one writes. Built-in models get Hugging Face's names
    (``hf_names``), Hugging Face's models are saved by their own ``save_pretrained``, and a model of a user's
    function keeps its own names::

        weights/model.safetensors                      in the type of the master weights
                config.json                            not for a model from the user's function
                tokenizer.json, tokenizer_config.json  of a BPE of the study's own

    ``tokenizer``: the folder of the run's tokens.

    Raises:
        OSError: they could not be written.
    """
    weights = _gathered_weights(model, group)
    if group.rank != 0:
        return
    # by an attempt that was killed
    for draft in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(draft, ignore_errors=True)
    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        draft.mkdir(parents=True)
        with as_os_error():
            _write_weights(model, weights, config, draft)
        if config.data.tokenizer == "bpe" and tokenizer is not None:
            _write_tokenizer(tokenizer, draft)
        for path in draft.iterdir():
            # the umask's: safetensors lets only the owner read
            path.chmod(draft.stat().st_mode & 0o666)
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        # of an attempt that was killed before its result
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _gathered_weights(model: nn.Module, group: Group) -> dict[str, Tensor]:
    """Collect a model's whole weights in the first process, without the buffers of delayed scales."""
    weights: dict[str, Tensor] = {}
    for name, tensor in model_tensors(model):
        if name.rpartition(".")[2] in BUFFERS_OF_SCALES:
            continue
        whole = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
        if group.rank == 0:
            weights[name] = whole.detach().cpu()
    return weights


def _write_weights(
    model: nn.Module, weights: dict[str, Tensor], config: RunConfig, folder: Path
) -> None:
    from ablate.models.hf_names import hugging_face_config, to_hugging_face

    if config.model.hf is not None:
        _save_pretrained(model, weights, folder)
        return
    if config.model.is_built_in:
        weights = to_hugging_face(config.model, weights)
        dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
        content = hugging_face_config(config, dtype)
        write_json_atomic(folder / "config.json", content)
    write_tensors(folder / _FILE, weights, {"format": "pt"})


def _write_tokenizer(tokenizer: Path, folder: Path) -> None:
    from ablate.data.tokenise import END_OF_TEXT

    shutil.copyfile(tokenizer / "tokenizer.json", folder / "tokenizer.json")
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
    write_json_atomic(folder / "tokenizer_config.json", content)


def _save_pretrained(module: Any, weights: dict[str, Tensor], folder: Path) -> None:
    """Save by the model's own class, built anew without quantised layers."""
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
    """Load the weights in a folder, by the module's own names; not for Hugging Face's models.

    Raises:
        OSError: they are damaged.
        KeyError: they belong to another model.
    """
    from safetensors.torch import load_file

    from ablate.models.hf_names import from_hugging_face

    with as_os_error():
        weights = load_file(folder / _FILE)
    if config.model.is_built_in:
        return from_hugging_face(config.model, weights)
    return weights
