"""A run's checkpoints: tensors as safetensors, and beside them a manifest that says they are whole.

::

    checkpoints/<step>.safetensors   weights, optimizer, buffers
                <step>.json          the manifest: the trainer's numbers, size and hash of the tensors, and
                                     how far the metrics had come (bytes and hash)

The tensors are written, synced and renamed before the manifest is: a checkpoint without one does not exist.
The last two are kept. Nothing here can run code: safetensors and JSON hold data alone.

How it fails: a checkpoint that is truncated, or has a bit flipped, or belongs to metrics that are no longer
there, is passed over for the one before it, and ``load_newest`` says so. Without a good one the run begins
anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ablate.json_text import parse_json
from ablate.store.files import write_json_atomic

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

FORMAT = 1
KEPT = 2
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A trainer's state: tensors by name, plain numbers, and the metrics written before it."""

    step: int
    tensors: dict[str, Tensor]
    numbers: dict[str, Any]
    metrics_bytes: int
    metrics_hash: str


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, then drop those before the last two.

    Raises:
        OSError: it could not be written; what was there before is untouched.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{checkpoint.step:012d}.safetensors"
    temporary = folder / f".{target.name}.{os.getpid()}"
    try:
        # The library writes through memory that is mapped, or at once: it must be on disk before the rename.
        save_file({name: tensor.contiguous() for name, tensor in checkpoint.tensors.items()}, temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        size, digest = temporary.stat().st_size, _hash(temporary)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    manifest = {
        "format": FORMAT,
        "step": checkpoint.step,
        "numbers": checkpoint.numbers,
        "bytes": size,
        "hash": digest,
        "metrics_bytes": checkpoint.metrics_bytes,
        "metrics_hash": checkpoint.metrics_hash,
    }
    write_json_atomic(target.with_suffix(".json"), manifest | {"manifest_hash": _hash_of(manifest)})
    _prune(folder)


def load_newest(folder: Path, metrics_path: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint that is whole, and a line for each that was passed over."""
    passed_over: list[str] = []
    for path in sorted(folder.glob("*.json"), reverse=True):
        try:
            return _load(path, metrics_path), passed_over
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            passed_over.append(f"checkpoint {path.name}: {error}")
    return None, passed_over


def drop_checkpoints(folder: Path) -> None:
    """Remove all checkpoints of a run that has its result; what cannot be removed stays."""
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError):
            path.unlink()
    for path in [*folder.glob("*.safetensors"), *folder.glob(".*")]:
        with contextlib.suppress(OSError):
            path.unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


def hash_of_prefix(path: Path, count: int) -> str:
    """Return the hash of a file's first ``count`` bytes.

    Raises:
        ValueError: it has fewer.
    """
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        left = count
        while left:
            chunk = file.read(min(left, _CHUNK_BYTES))
            if not chunk:
                raise ValueError(f"{path.name} has fewer than {count} bytes")
            digest.update(chunk)
            left -= len(chunk)
    return digest.hexdigest()


def _load(path: Path, metrics_path: Path) -> Checkpoint:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    manifest = parse_json(path.read_bytes())
    if manifest.pop("manifest_hash") != _hash_of(manifest):
        raise ValueError("its manifest is damaged")
    if manifest["format"] != FORMAT:
        raise ValueError(f"of format {manifest['format']}")
    tensors = path.with_suffix(".safetensors")
    if tensors.stat().st_size != manifest["bytes"] or _hash(tensors) != manifest["hash"]:
        raise ValueError("its tensors are damaged")
    if hash_of_prefix(metrics_path, manifest["metrics_bytes"]) != manifest["metrics_hash"]:
        raise ValueError("the metrics before it are damaged")
    try:
        loaded = load_file(tensors)
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    return Checkpoint(
        step=int(manifest["step"]),
        tensors=loaded,
        numbers=dict(manifest["numbers"]),
        metrics_bytes=int(manifest["metrics_bytes"]),
        metrics_hash=str(manifest["metrics_hash"]),
    )


def _hash_of(manifest: dict[str, Any]) -> str:
    text = json.dumps(manifest, sort_keys=True, allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _prune(folder: Path) -> None:
    manifests = sorted(folder.glob("*.json"), reverse=True)
    for path in manifests[KEPT:]:
        path.unlink(missing_ok=True)
    kept = {path.stem for path in manifests[:KEPT]}
    for path in folder.glob("*.safetensors"):
        if path.stem not in kept:
            path.unlink(missing_ok=True)
