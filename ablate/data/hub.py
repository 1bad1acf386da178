"""Hugging Face data sets, streamed: ``paths: [name]`` or ``paths: [name, configuration]``.

Hashing a data set on the hub would download all of it, so its commit represents its content: the one pinned
by ``name@commit``, else the hub's current one. A pinned data set can be planned offline. A local folder is
hashed like any other and never uses the network; it holds files that ``load_dataset`` reads, or the output of
``save_to_disk``. The training text is the split ``train``; ``validation_paths`` may name another split.

A stream has one reader. ``fetch`` writes it as shards of JSON lines, which are then processed like other
files.

How it fails: ``UserError`` if ``datasets`` is not installed, the hub is unreachable, the data set,
configuration or split does not exist, or a row has no text field.
"""

from __future__ import annotations

import importlib.util
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ablate.base.errors import UserError, first_line
from ablate.data.cache import find, keep, key_of
from ablate.data.documents import text_of
from ablate.data.sources import SourceFile, find_files, stat_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO

    from ablate.run.config import DataConfig

Found = TypeVar("Found")

TRAIN_SPLIT = "train"
SHARD_FIELD = "text"

_SHARD_BYTES = 64 << 20
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """A data set at one commit, or a local folder (then ``files`` holds its content)."""

    name: str
    configuration: str | None
    validation_split: str | None
    commit: str | None
    files: tuple[SourceFile, ...]

    def identity(self) -> dict[str, str | None]:
        """Return everything that can change the text: a local folder's files, but not its name."""
        return {
            "name": None if self.files else self.name,
            "commit": self.commit,
            "configuration": self.configuration,
            "validation_split": self.validation_split,
        }


def locate(data: DataConfig) -> HubSource:
    """Return the data set that ``data.paths`` names."""
    paths, validation_paths = data.paths, data.validation_paths
    if len(paths) > 2 or len(validation_paths) > 1:
        raise UserError(
            "data.source: hub takes one data set",
            hint="paths: [name] or [name, configuration]; validation_paths: [split]",
        )
    if importlib.util.find_spec("datasets") is None:
        raise UserError("data.source: hub needs the package 'datasets'", hint="pip install -e '.[hub]'")
    name, _, revision = paths[0].partition("@")
    folder = Path(paths[0]).expanduser()
    files = tuple(find_files([str(folder)], ())) if folder.is_dir() else ()
    if not files and data.max_bytes is None:
        hint = "a data set on the hub is streamed; say how much text to take, such as 1_000_000_000"
        raise UserError("data.max_bytes is missing, but data.source: hub needs it", hint=hint)
    return HubSource(
        name=str(folder.absolute()) if files else name,
        configuration=paths[1] if len(paths) == 2 else None,
        validation_split=validation_paths[0] if validation_paths else None,
        commit=None if files else _commit(name, revision),
        files=files,
    )


def _commit(name: str, revision: str) -> str:
    if _COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(name, revision=revision or None, timeout=20).sha
    except Exception as error:  # offline, unknown name, no rights, proxy: many types, one remedy
        hint = f"check the name and the connection; pinned as {name}@<40-digit commit> it plans offline"
        raise _unusable(name, error, hint) from error
    if commit is None:
        raise UserError(f"the hub names no commit of data set '{name}'", hint="pin one as name@commit")
    return commit


def documents(source: HubSource, split: str, text_field: str, skip: int = 0) -> Iterator[str]:
    """Stream the texts of one split, without its first ``skip`` rows."""
    try:
        rows = _rows(source, split)
        for number, row in enumerate(rows.skip(skip) if skip else rows, start=skip + 1):
            yield text_of(row, text_field, source.name, number)
    except UserError:
        raise
    except Exception as error:
        raise _unusable(
            source.name, error, f"check the name, the configuration and the split '{split}'"
        ) from error


def fetch(
    source: HubSource, data: DataConfig, folder: Path, report: Callable[[int], None], *, key: str
) -> list[tuple[SourceFile, str]]:
    """Write the training split as shards of JSON lines with the field ``SHARD_FIELD``.

    ``report`` receives bytes of text. ``key`` identifies the content. Shards that an earlier attempt finished
    are kept, and their rows are skipped.

    Returns:
        Each shard with its content hash.
    """
    shards: list[tuple[SourceFile, str]] = []
    rows = text_bytes = 0
    stream: Iterator[str] | None = None
    ended = False

    def enough(size: int) -> bool:
        return data.max_bytes is not None and size >= data.max_bytes

    def write(file: BinaryIO) -> dict[str, Any]:
        count = size = 0
        for text in stream or ():
            file.write(json.dumps({SHARD_FIELD: text}).encode() + b"\n")
            count += 1
            if text.strip():  # as ``max_bytes`` counts it
                size += len(text.encode("utf-8", "replace"))
            report(text_bytes + size)
            if size >= _SHARD_BYTES or enough(text_bytes + size):
                return {"rows": count, "text_bytes": size, "ended": False}
        return {"rows": count, "text_bytes": size, "ended": True}

    while not ended and not enough(text_bytes):
        path = folder / f"{key_of([key, len(shards)])}.jsonl"
        record = find(path) if stream is None else None
        if record is None:
            stream = stream or documents(source, TRAIN_SPLIT, data.text_field, rows)
            record = keep(path, write)
        shards.append((stat_file(str(path.absolute()), path.name), record["sha256"]))
        rows += record["rows"]
        text_bytes += record["text_bytes"]
        ended = record.get("ended", False)
        report(text_bytes)
    return shards


def _rows(source: HubSource, split: str) -> Any:
    import datasets

    has_splits = (Path(source.name) / "dataset_dict.json").is_file()
    whole = all((Path(source.name) / name).is_file() for name in ("state.json", "dataset_info.json"))
    if not source.files or not (has_splits or whole):
        return datasets.load_dataset(
            source.name, source.configuration, split=split, streaming=True, revision=source.commit
        )
    if source.configuration is not None:
        what, hint = "what save_to_disk wrote has no configurations", f"paths: [{source.name}]"
        raise UserError(what, file=source.name, hint=hint)
    saved = datasets.load_from_disk(source.name)
    splits = dict(saved) if has_splits else {TRAIN_SPLIT: saved}
    if split not in splits:
        raise UserError(f"has no split '{split}'", file=source.name, hint=f"splits here: {', '.join(splits)}")
    return splits[split]


def _unusable(name: str, error: Exception, hint: str) -> UserError:
    return UserError(f"hub data set '{name}' cannot be read: {first_line(error)}", hint=hint)


def cached_first(fetch: Callable[[bool], Found], what: str, hint: str) -> Found:
    """Return what ``fetch(local_files_only)`` finds in the local hub cache, else on the hub.

    Raises:
        UserError: ``what`` and the first line of the hub's error.
    """
    with suppress(Exception):  # not in the cache, which raises many types
        return fetch(True)
    try:
        return fetch(False)
    except Exception as error:
        raise UserError(f"{what}: {first_line(error)}", hint=hint) from error
