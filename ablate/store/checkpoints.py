"""A run's checkpoints: tensors as safetensors, and a manifest that says they are complete.

::

    checkpoints/<step>.safetensors           weights, optimizer, buffers
                <step>.<i>of<n>.safetensors  the same for a run on n devices: the rows of process i
                <step>.json                  the manifest: the trainer's numbers, size and hash of each file,
                                             size and hash of the run's rows before the step

The manifest is written last, after the tensors are synced and renamed: a checkpoint without one does not
exist. The last two are kept. A state that other runs start from is kept beside the runs, in
``prefixes/<key>``, in the same layout: rows and one checkpoint. It appears whole or not at all. Loading runs
no code: safetensors and JSON hold data alone. Tensors are read on demand, whole or by rows, so that a run can
resume on another number of devices.

How it fails: ``load_newest`` skips a checkpoint that is damaged or whose rows are gone, takes the one
before it, and says so. Without a good checkpoint the run starts from the beginning.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ablate.base.files import hash_of, read_record, write_bytes_atomic, write_record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

FORMAT = 3
KEPT = 2
_FOLDER = "checkpoints"
_BAD = (OSError, ValueError, KeyError, TypeError)
"""Errors of a checkpoint that is missing or damaged."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a checkpoint's files. ``pieces``: each file with its rows, which follow one another."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[Path, int], ...]

    def read(self, rows: slice) -> Tensor:
        """Read the given rows; a tensor without dimensions is read whole."""
        import torch
        from safetensors import safe_open

        if not self.shape:
            with safe_open(self.pieces[0][0], framework="pt") as file:
                return file.get_tensor(self.name)  # type: ignore[no-any-return]
        first, last, _ = rows.indices(self.shape[0])
        spans = []
        for path, count in self.pieces:
            start = max(first, 0)
            stop = min(last, count)
            if start < stop:
                spans.append((path, start, stop))
            first -= count
            last -= count
        parts = []
        for path, start, stop in spans or [(self.pieces[0][0], 0, 0)]:
            with safe_open(path, framework="pt") as file:
                parts.append(file.get_slice(self.name)[start:stop])
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def read_rows(source: Tensor | StoredTensor, rows: slice) -> Tensor:
    """Read the given rows of a tensor; one without dimensions is read whole."""
    if isinstance(source, StoredTensor):
        return source.read(rows)
    return source[rows] if source.dim() else source


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A trainer's state after ``step`` optimizer steps: tensors by name, and plain numbers.

    ``sharded``: names of tensors of which this snapshot only holds one process's rows.
    """

    step: int
    tensors: Mapping[str, Tensor | StoredTensor]
    numbers: dict[str, Any]
    sharded: frozenset[str] = frozenset()

    def whole(self, prefix: str = "") -> dict[str, Tensor]:
        """Read the whole tensors whose names begin with ``prefix``, named without it, in CPU memory."""
        return {
            name.removeprefix(prefix): read_rows(tensor, slice(None))
            for name, tensor in self.tensors.items()
            if name.startswith(prefix)
        }


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Snapshot):
    """A snapshot in files, whose tensors are read on demand.

    ``rows``: how many bytes of each file of rows were written before it. ``fingerprints``: of the arithmetic
    of the attempts that trained it, in their order.
    """

    rows: dict[str, int]
    fingerprints: tuple[str, ...] = ()


def save_part(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    *,
    index: int = 0,
    count: int = 1,
) -> dict[str, Any]:
    """Write the tensors of one process, out of ``count``; return what the manifest says of their file.

    Raises:
        OSError: they could not be written; earlier files are untouched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    suffix = f".{index}of{count}" if count > 1 else ""
    target = folder / f"{step:012d}{suffix}.safetensors"
    temporary = folder / f".{target.name}.{os.getpid()}"
    try:
        write_tensors(temporary, tensors)
        part = {
            "name": target.name,
            "bytes": temporary.stat().st_size,
            "hash": _hash(temporary),
        }
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return part


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write and sync a safetensors file; raises ``OSError``."""
    from safetensors.torch import save_file

    with as_os_error():
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            path,
            metadata=metadata,
        )
    with path.open("rb+") as file:  # safetensors may have written through mapped memory
        os.fsync(file.fileno())


@contextlib.contextmanager
def as_os_error() -> Iterator[None]:
    """Turn errors of safetensors, about the file system (a full disk) or about damage, into ``OSError``."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        if match := re.search(r"os error (\d+)", str(error)):
            number = int(match[1])
            raise OSError(number, os.strerror(number)) from None
        raise OSError(str(error)) from None


def save_manifest(
    folder: Path,
    step: int,
    parts: Sequence[dict[str, Any]],
    *,
    numbers: dict[str, Any],
    rows: Mapping[str, tuple[int, str]],
    fingerprints: Sequence[str] = (),
    sharded: Iterable[str] = (),
    prefix: Path | None = None,
) -> None:
    """Write the manifest of a checkpoint whose files are written, then drop all but the last two.

    ``prefix``: a folder in which the state is also kept for other runs, if it is not there yet. ``rows``:
    size and hash of the rows before it, by the name of their file beside the folder. ``sharded``: names of
    the tensors whose rows are spread over the files; every file holds the others in full.

    Raises:
        OSError: the manifest could not be written.
    """
    content = {
        "format": FORMAT,
        "step": step,
        "numbers": numbers,
        "files": list(parts),
        "sharded": sorted(sharded),
        "rows": rows,
        "fingerprints": list(fingerprints),
    }
    # first: a run that is killed here comes here again
    if prefix is not None and not prefix.exists():
        draft = prefix.with_name(f".{prefix.name}.{os.getpid()}")
        shutil.rmtree(draft, ignore_errors=True)
        try:
            _copy_state(folder, content, draft)
            draft.rename(prefix)
        except OSError:
            shutil.rmtree(draft, ignore_errors=True)
            if not prefix.exists():  # else another run was faster, with the same state
                raise
    write_record(_manifest_path(folder, step), content)
    manifests = _manifests(folder)
    for path in manifests[KEPT:]:
        path.unlink(missing_ok=True)
    steps = {path.stem for path in manifests[:KEPT]}
    for path in folder.glob("*.safetensors"):
        if path.name.partition(".")[0] not in steps:
            path.unlink(missing_ok=True)


def _manifest_path(folder: Path, step: int) -> Path:
    return folder / f"{step:012d}.json"


def _manifests(folder: Path) -> list[Path]:
    """List the manifests, the newest first."""
    return sorted(folder.glob("*.json"), reverse=True)


def _copy_state(folder: Path, manifest: dict[str, Any], target: Path) -> None:
    """Copy a checkpoint and the rows before it into another run's folder, the manifest last."""
    (target / _FOLDER).mkdir(parents=True, exist_ok=True)
    for name, (count, _) in manifest["rows"].items():
        with (folder.parent / name).open("rb") as rows:
            write_bytes_atomic(target / name, rows.read(count))
    for part in manifest["files"]:
        source = folder / part["name"]
        copy = target / _FOLDER / part["name"]
        copy.unlink(missing_ok=True)
        try:
            # such a file is never written again, only replaced
            copy.hardlink_to(source)
        except OSError:  # a file system without hard links
            shutil.copyfile(source, copy)
    write_record(_manifest_path(target / _FOLDER, manifest["step"]), manifest)


def load_newest(
    folder: Path, prefix: tuple[Path, int] | None = None
) -> tuple[Checkpoint | None, list[str]]:
    """Load the newest good checkpoint, or None; also return a line for each newer one that was skipped.

    ``prefix``: folder and step of a state with which a run begins that has no good checkpoint of its own. Its
    rows and its checkpoint are copied to the run, as if it had trained these steps.
    """
    lines: list[str] = []
    for path in _manifests(folder):
        try:
            return load_step(folder, int(path.stem)), lines
        except _BAD as error:
            lines.append(f"checkpoint {path.name}: {error}")
    if prefix is not None:
        prefix_folder, step = prefix
        source = prefix_folder / _FOLDER
        try:
            load_step(source, step)
            _copy_state(
                source, read_record(_manifest_path(source, step)), folder.parent
            )
            lines.append(
                f"its first {step} steps are those of other runs: taken from {prefix_folder.name}"
            )
            return load_step(folder, step), lines
        except _BAD as error:
            lines.append(f"prefix {prefix_folder.name}: {error}")
    return None, lines


def newest_step(folder: Path) -> int:
    """Find the step of the newest checkpoint, good or not; 0 without one."""
    return max(
        (int(path.stem) for path in folder.glob("*.json") if path.stem.isdecimal()),
        default=0,
    )


def checkpointed_rows(folder: Path, name: str) -> tuple[bytes, list[str]]:
    """Read the rows of a file before the newest good checkpoint, and a line for each bad checkpoint.

    A checkpoint is good here if its manifest and these rows are undamaged; its tensors are not checked. No
    hash covers the rows after it.
    """
    faults: list[str] = []
    for path in _manifests(folder):
        try:
            known = read_record(path)["rows"].get(name, (0, hash_of(b"")))
            return _rows_before(path, known, name), faults
        except _BAD as error:
            if path.exists():  # else the run is at work, and has just removed it
                faults.append(f"{path}: {error}")
    return b"", faults


def load_step(folder: Path, step: int) -> Checkpoint:
    """Load the checkpoint after a step; its tensors are hashed here, but read later.

    Raises:
        OSError, ValueError, KeyError, TypeError: it is missing or damaged.
    """
    from safetensors import safe_open

    path = _manifest_path(folder, step)
    manifest = read_record(path)
    if manifest["format"] != FORMAT:
        raise ValueError(f"of format {manifest['format']}")
    files = []
    shapes = []
    for part in manifest["files"]:
        file = path.with_name(part["name"])
        if file.stat().st_size != part["bytes"] or _hash(file) != part["hash"]:
            raise ValueError("its tensors are damaged")
        with as_os_error(), safe_open(file, framework="pt") as tensors:
            shapes.append(
                {
                    name: tuple(tensors.get_slice(name).get_shape())
                    for name in tensors.keys()  # noqa: SIM118
                }
            )
        files.append(file)
    tensors_by_name = {}
    for name, shape in shapes[0].items():
        if name in manifest["sharded"]:
            rows = [shapes_of_file[name][0] for shapes_of_file in shapes]
            whole = (sum(rows), *shape[1:])
            pieces = tuple(zip(files, rows, strict=True))
        else:
            whole = shape
            pieces = ((files[0], shape[0] if shape else 1),)
        tensors_by_name[name] = StoredTensor(name=name, shape=whole, pieces=pieces)
    return Checkpoint(
        step=int(manifest["step"]),
        tensors=tensors_by_name,
        numbers=dict(manifest["numbers"]),
        rows={
            name: len(_rows_before(path, known, name))
            for name, known in manifest["rows"].items()
        },
        fingerprints=tuple(manifest["fingerprints"]),
    )


def _rows_before(manifest: Path, known: tuple[int, str], name: str) -> bytes:
    """Read the first bytes of a file; raises ``ValueError`` if they differ from ``known``, (size, hash)."""
    count, known_hash = known
    content = b""
    if count:
        with (manifest.parent.parent / name).open("rb") as file:
            content = file.read(count)
    if len(content) != count or hash_of(content) != known_hash:
        raise ValueError(f"the rows of {name} before it are damaged")
    return content


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(
            file, lambda: hashlib.blake2b(digest_size=16)
        ).hexdigest()
