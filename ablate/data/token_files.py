"""The prepared tokens of a corpus: two flat files and a ``meta.json`` that describes them.

``meta.json`` is written last, so a folder without it is not prepared. A folder whose file sizes differ from
``meta.json`` is damaged; ``load`` rejects it, ``prepare`` makes it again. The user's own token files are used
in place; ``meta.json`` then records their size and modification time, and ``load`` rejects a file that has
changed since.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ablate.base.errors import Problem, UserError
from ablate.base.files import read_json

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

META = "meta.json"
FORMAT = 1

TokenType = Literal["uint16", "uint32"]
ITEM_BYTES: dict[TokenType, int] = {"uint16": 2, "uint32": 4}


@dataclass(frozen=True, kw_only=True)
class TokenFiles:
    """The location and description of a corpus's tokens. Plain data that can be sent to a worker.

    ``train`` may be longer than ``train_tokens``: a token file used in place whose end is held out.
    ``validation_bytes_per_token`` converts nats per token to bits per byte: bits/byte = nats / ln 2 / it. It
    counts end-of-text tokens as tokens, and is None if the source was already tokens.
    """

    folder: Path
    train: Path
    validation: Path
    dtype: TokenType
    vocab_size: int
    train_tokens: int
    validation_tokens: int
    digest: str
    tokenizer: str
    validation_bytes_per_token: float | None


def load(folder: Path) -> TokenFiles:
    """Reopen tokens that ``prepare`` made.

    Raises:
        UserError: the folder is not prepared, or is damaged.
    """
    try:
        meta = read_json(folder / META)
        if meta["format"] != FORMAT:
            raise _damaged(folder, f"has format {meta['format']}, not {FORMAT}")
        files = TokenFiles(
            folder=folder,
            train=folder / meta["train"],  # joining an absolute path gives that path
            validation=folder / meta["validation"],
            dtype=meta["dtype"],
            vocab_size=meta["vocab_size"],
            train_tokens=meta["train_tokens"],
            validation_tokens=meta["validation_tokens"],
            digest=meta["digest"],
            tokenizer=meta["tokenizer"],
            validation_bytes_per_token=meta["validation_bytes_per_token"],
        )
        item = ITEM_BYTES[files.dtype]
        sizes = {files.train: files.train_tokens * item, files.validation: files.validation_tokens * item}
        if meta["in_place"] is not None:
            status = files.train.stat()
            if [status.st_size, status.st_mtime_ns] != meta["in_place"]:
                raise _damaged(folder, f"{files.train} changed since the tokens were prepared")
            del sizes[files.train]
        for path, size in sizes.items():
            if path.stat().st_size != size:
                raise _damaged(folder, f"{path.name} has {path.stat().st_size} bytes, not {size}")
    except OSError as error:
        raise _damaged(folder, f"{error.filename}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, f"{META} cannot be understood") from error
    return files


def open_tokens(files: TokenFiles) -> tuple[np.memmap[Any, Any], np.memmap[Any, Any]]:
    """Map the (training, validation) tokens into memory, read-only."""
    import numpy as np

    dtype = np.dtype(files.dtype).newbyteorder("<")
    return (
        np.memmap(files.train, dtype=dtype, mode="r", shape=(files.train_tokens,)),
        np.memmap(files.validation, dtype=dtype, mode="r", shape=(files.validation_tokens,)),
    )


def _damaged(folder: Path, what: str) -> UserError:
    hint = "start the study again: tokens are then prepared anew"
    return UserError(Problem(file=str(folder), what=f"no usable token files: {what}", hint=hint))
