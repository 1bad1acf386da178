"""Hugging Face data sets, streamed: ``paths: [name]`` or ``paths: [name, configuration]``.

The content of a data set on the hub cannot be hashed without downloading all of it, so its commit stands
for the content: the one pinned as ``name@commit``, else the one that the hub names now. A pinned data set
plans offline. A folder that exists locally is hashed like any other and never touches the network. The
training text is the split ``train``; ``validation_paths`` may name another split.

Fails with ``UserError``: ``datasets`` not installed, the hub out of reach, no such data set, configuration
or split, a row without the text field.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate.data.sources import SourceFile, find_files
from ablate.errors import Problem, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.config import DataConfig

TRAIN_SPLIT = "train"
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """A data set at one commit, or a local folder of one (then ``files`` is its content)."""

    name: str
    configuration: str | None
    validation_split: str | None
    commit: str | None
    files: tuple[SourceFile, ...]

    def identity(self) -> dict[str, str | None]:
        """Return what can change the text; a local folder's name cannot, its files can."""
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
            Problem(
                what="data.source: hub takes one data set",
                hint="paths: [name] or [name, configuration]; validation_paths: [split]",
            )
        )
    if importlib.util.find_spec("datasets") is None:
        raise UserError(
            Problem(
                what="data.source: hub needs the package 'datasets'", hint="pip install 'ablate-fp4[hub]'"
            )
        )
    name, _, revision = paths[0].partition("@")
    folder = Path(paths[0]).expanduser()
    files = tuple(find_files([str(folder)], ())) if folder.is_dir() else ()
    if not files and data.max_bytes is None:
        hint = "a data set on the hub is streamed; say how much text to take, such as 1_000_000_000"
        raise UserError(Problem(what="data.max_bytes is missing, but data.source: hub needs it", hint=hint))
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
    except Exception as error:  # offline, no such name, no rights, a proxy: many types, one remedy
        hint = f"check the name and the connection; pinned as {name}@<40-digit commit> it plans offline"
        raise _unusable(name, error, hint) from error
    if commit is None:
        raise UserError(
            Problem(what=f"the hub names no commit of data set '{name}'", hint="pin one as name@commit")
        )
    return commit


def documents(source: HubSource, split: str, text_field: str) -> Iterator[str]:
    """Stream the texts of one split."""
    import datasets

    try:
        rows = datasets.load_dataset(
            source.name, source.configuration, split=split, streaming=True, revision=source.commit
        )
        for number, row in enumerate(rows, start=1):
            yield _text(source, number, row, text_field)
    except UserError:
        raise
    except Exception as error:
        raise _unusable(
            source.name, error, f"check the name, the configuration and the split '{split}'"
        ) from error


def _text(source: HubSource, number: int, row: dict[str, Any], text_field: str) -> str:
    text = row.get(text_field)
    if not isinstance(text, str):
        hint = f"fields here: {', '.join(row)}; set data.text_field"
        raise UserError(
            Problem(file=source.name, line=number, what=f"no text in field '{text_field}'", hint=hint)
        )
    return text


def _unusable(name: str, error: Exception, hint: str) -> UserError:
    first_line = str(error).strip().split("\n")[0] or type(error).__name__
    return UserError(Problem(what=f"hub data set '{name}' cannot be read: {first_line}", hint=hint))
