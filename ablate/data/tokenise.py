"""Convert a corpus to its two token files: from text (list, split, learn, encode) or from tokens.

``prepare`` manages the folder; this module fills it.

Text is read again for each step: that takes a thirtieth of the tokenising time, and a second copy of a large
corpus would not fit on many disks. Only text of the hub is written down. The tokeniser uses all cores by
threads of its own; while it works, other threads read and look for near copies. Training tokens are written
in the order of the source. The tokeniser learns from training documents only: merges learnt on validation
text would lower the validation loss unfairly.

A tokeniser is bytes, a BPE trained on the training text, or one of Hugging Face. Every document is followed
by the end-of-text token. For bytes that is byte 0, so the vocabulary is 256; a NUL inside a text becomes
U+FFFD. The others have a special token that text cannot produce: its literal spelling in a document is
tokenised as ordinary text.

Token files of the user are flat little-endian uint16 or uint32, without a header. A single training file is
used in place by memory map and never copied, because it may be hundreds of GB; several are joined. Without
validation files the last part is held out, by the same shares as text, and training ends before it. Every id
is checked once against the vocabulary, because an id that is too large would crash in the middle of a run (on
a GPU by an illegal memory access).

How it fails: ``UserError`` for too little text or too few tokens, an id outside the vocabulary (with file and
position), or a NumPy ``.npy`` file (its header would be read as tokens).
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.base.errors import UserError
from ablate.data import hub
from ablate.data.documents import (
    Documents,
    ValidationSide,
    encoded,
    file_documents,
    hold_out,
)
from ablate.data.identity import AT_LEAST_TOKENS, DataIdentity, held_out_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from ablate.data.sources import SourceFile
    from ablate.run.config import DataConfig

    OnProgress = Callable[[float, str], None]
    Encode = Callable[[Sequence[bytes]], NDArray[Any]]

_BATCH_BYTES = 1 << 19
_AT_ONCE = 3
_CHECK_PATHS = "check data.paths and data.validation_paths"
_CHUNK_TOKENS = 1 << 22

END_OF_TEXT = "<|endoftext|>"
BPE_SAMPLE_BYTES = 64 << 20
"""Merges are learnt from this many bytes at the start of the training text: more would change few of them."""


def encode_bytes(texts: Sequence[bytes]) -> NDArray[Any]:
    """Join the bytes of all texts as uint8, each text followed by 0."""
    nul_instead = "\N{REPLACEMENT CHARACTER}".encode()
    joined = b"".join(text.replace(b"\0", nul_instead) + b"\0" for text in texts)
    return np.frombuffer(joined, dtype=np.uint8)


class JsonTokenizer:
    """A tokeniser of the ``tokenizers`` package."""

    def __init__(self, tokenizer: Any, end_of_text: str) -> None:
        self._tokenizer = tokenizer
        self._end_id = tokenizer.token_to_id(end_of_text)
        self.vocab_size: int = tokenizer.get_vocab_size()
        # Some tokenizer.json files set these for single inputs; here they would truncate documents.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True

    def encode(self, texts: Sequence[bytes]) -> NDArray[Any]:
        """Join the ids of all texts as uint32, each text followed by the end-of-text token."""
        decoded = [text.decode("utf-8", "replace") for text in texts]
        ids: list[int] = []
        for encoding in self._tokenizer.encode_batch_fast(
            decoded, add_special_tokens=False
        ):
            ids += encoding.ids
            ids.append(self._end_id)
        return np.array(ids, dtype=np.uint32)

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json``, which decodes the tokens, beside them."""
        self._tokenizer.save(str(folder / "tokenizer.json"))


def train_bpe(texts: Iterable[bytes], vocab_size: int) -> JsonTokenizer:
    """Train a byte-level BPE. The same texts give the same tokeniser.

    A small corpus can run out of pairs before ``vocab_size``; the remaining ids then never occur.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    backend.train_from_iterator(
        (text.decode("utf-8", "replace") for text in texts), trainer
    )
    return JsonTokenizer(backend, END_OF_TEXT)


def open_json(found: hub.HfTokenizer) -> JsonTokenizer:
    """Open what ``hub.find_tokenizer`` found."""
    from tokenizers import Tokenizer

    return JsonTokenizer(Tokenizer.from_file(str(found.json_path)), found.end_of_text)


def prepare_text(
    data: DataConfig, corpus: DataIdentity, folder: Path, progress: OnProgress
) -> dict[str, Any]:
    """Write ``train.bin`` and ``validation.bin`` and return their part of ``meta.json``."""
    progress(0.0, "reading text")
    fetched = folder / "fetched.txt"
    spool = folder / "validation.txt"
    read = partial(_documents, data, corpus)
    listed = Documents(read(corpus.train, "train"), fetched if corpus.hub else None)

    def training_text() -> Iterator[bytes]:
        if corpus.hub:
            return listed.texts()
        return read(corpus.train, "train")

    order = None
    if data.validation_paths:
        validation = Documents(read(corpus.validation, data.validation_paths[0]), spool)
        if not len(validation.lengths):
            raise UserError("there is no validation text", hint=_CHECK_PATHS)
    else:
        chosen = set(hold_out(listed.hashes, listed.lengths).tolist())
        texts = (text for index, text in enumerate(training_text()) if index in chosen)
        validation = Documents(texts, spool)
        order = np.argsort(validation.hashes)
    side = ValidationSide(validation)
    encode, description = _tokenizer(
        data, corpus, training_text(), side, folder, progress
    )
    dtype = np.dtype("<u2" if corpus.vocab_size <= 1 << 16 else "<u4")

    def write(
        name: str, texts: Iterator[bytes], side: ValidationSide | None, num_bytes: int
    ) -> Counter[str]:
        counts = Counter[str]()
        with (folder / name).open("wb") as file:
            for tokens, counts_of_batch in _encoded_batches(texts, encode, side):
                tokens.astype(dtype).tofile(file)
                counts.update(counts_of_batch, tokens=len(tokens))
                progress(min(1.0, counts["read"] / num_bytes), "tokenising")
        return counts

    held_out = write(
        "validation.bin", validation.texts(order), None, validation.lengths.sum()
    )
    train = write("train.bin", training_text(), side, listed.lengths.sum())
    near_copies = train["near copies"]
    if not train["documents"]:
        fault = "there is no training text but validation text"
        if near_copies:
            fault = "all training text is nearly the same as validation text"
        raise UserError(fault, hint=_CHECK_PATHS)
    spool.unlink()
    fetched.unlink(missing_ok=True)
    used = train["documents"] + near_copies
    if not data.validation_paths:
        used += held_out["documents"]
    return {
        "train": "train.bin",
        "in_place": None,
        "dtype": dtype.name,
        "train_tokens": train["tokens"],
        "validation_tokens": held_out["tokens"],
        "tokenizer": description,
        "validation_bytes_per_token": held_out["bytes"] / held_out["tokens"],
        "train_bytes": train["bytes"],
        "validation_bytes": held_out["bytes"],
        "copies_left_out": len(listed.lengths) - used,
        "near_copies_left_out": near_copies,
    }


def _documents(
    data: DataConfig, corpus: DataIdentity, files: Sequence[SourceFile], split: str
) -> Iterator[bytes]:
    """Read the documents of files, or of a split of the hub's data set."""
    if corpus.hub:
        return encoded(
            hub.documents(corpus.hub, split, data.text_field), data.max_bytes
        )
    text_field = data.text_field if data.source == "jsonl" else None
    # so that ``max_bytes`` takes a mixture, not the first letters
    if text_field is None:
        files = sorted(
            files, key=lambda file: hashlib.sha256(file.name.encode()).digest()
        )
    return encoded(
        chain.from_iterable(file_documents(file, text_field) for file in files),
        data.max_bytes,
    )


def _tokenizer(
    data: DataConfig,
    corpus: DataIdentity,
    training_text: Iterator[bytes],
    side: ValidationSide,
    folder: Path,
    progress: OnProgress,
) -> tuple[Encode, str]:
    """Open or learn the tokeniser, and save it in the folder; return what encodes, and its description."""
    if corpus.hf is not None:
        tokenizer = open_json(corpus.hf)
        description = f"{data.tokenizer_path}, {corpus.hf.vocab_size} tokens"
    elif data.tokenizer == "bpe":
        progress(0.0, "learning the BPE")
        tokenizer = _learn_bpe(training_text, side, corpus.vocab_size)
        description = f"byte-level BPE, {tokenizer.vocab_size} tokens"
    else:
        return encode_bytes, "bytes"
    tokenizer.save(folder)
    return tokenizer.encode, description


def _encoded_batches(
    texts: Iterator[bytes],
    encode: Encode,
    side: ValidationSide | None,
) -> Iterator[tuple[NDArray[Any], dict[str, int]]]:
    """Yield the tokens of texts in their order, with counts of them and of what was left out.

    ``side``: the validation text that training text must not repeat.
    """

    def encode_batch(batch: list[bytes]) -> tuple[NDArray[Any], dict[str, int]]:
        kept_texts = batch
        near_copies = 0
        if side is not None:
            kept_texts, near_copies = side.leave_out(batch)
        return encode(kept_texts), {
            "documents": len(kept_texts),
            "bytes": sum(map(len, kept_texts)),
            "read": sum(map(len, batch)),
            "near copies": near_copies,
        }

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        waiting: deque[Future[Any]] = deque()
        # The empty batches at the end are never waited for: they let the others out of the queue.
        for batch in chain(_batches(texts), [[]] * _AT_ONCE):
            waiting.append(pool.submit(encode_batch, batch))
            if len(waiting) > _AT_ONCE:
                yield waiting.popleft().result()


def _batches(texts: Iterable[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_BYTES:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def _learn_bpe(
    texts: Iterator[bytes], side: ValidationSide, vocab_size: int
) -> JsonTokenizer:
    sample: list[bytes] = []
    size = 0
    for batch in _batches(texts):
        training, _ = side.leave_out(batch)
        sample += training
        size += sum(map(len, training))
        if size >= BPE_SAMPLE_BYTES:
            break
    learnt: Future[JsonTokenizer] = Future()

    def learn() -> None:
        try:
            learnt.set_result(train_bpe(sample, vocab_size))
        except BaseException as error:
            learnt.set_exception(error)

    # The library learns for minutes without reacting to Ctrl-C; a daemon thread can be left behind.
    threading.Thread(target=learn, daemon=True).start()
    return learnt.result()


def prepare_tokens(
    data: DataConfig, corpus: DataIdentity, folder: Path, progress: OnProgress
) -> dict[str, Any]:
    """Check the user's token files, write the files that are needed, return their part of ``meta.json``."""
    dtype = np.dtype(data.token_dtype).newbyteorder("<")
    total = sum(file.size for file in corpus.train) // dtype.itemsize
    if data.max_bytes is not None:
        total = min(total, max(1, data.max_bytes // dtype.itemsize))
    held_out = 0 if corpus.validation else held_out_size(total, AT_LEAST_TOKENS)
    if total - held_out < 1 or (held_out < 1 and not corpus.validation):
        raise UserError(
            f"too few tokens for a validation set: {total}",
            file=corpus.train[0].path,
            hint="add tokens to data.paths, or name others in data.validation_paths",
        )
    progress(0.0, "checking tokens")

    def write(name: str, files: Sequence[SourceFile], start: int, stop: int) -> int:
        """Check the tokens ``start`` to ``stop`` of the joined files; write them to ``name``; count them."""
        count = 0
        with (folder / name).open("wb") if name else nullcontext() as written:
            for chunk in _checked_chunks(files, dtype, corpus.vocab_size, start, stop):
                count += len(chunk)
                if written:
                    chunk.tofile(written)
        return count

    train = name = "train.bin"
    in_place = None
    if len(corpus.train) == 1:
        name = ""
        train = corpus.train[0].path
        in_place = [corpus.train[0].size, corpus.train[0].mtime_ns]
    train_tokens = write(name, corpus.train, 0, total - held_out)
    held_out_from = (corpus.train, total - held_out, total)
    if corpus.validation:
        held_out_from = (corpus.validation, 0, sys.maxsize)
    validation_tokens = write("validation.bin", *held_out_from)
    if not validation_tokens:
        raise UserError(
            "no tokens", file=corpus.validation[0].path, hint="check the file"
        )
    return {
        "train": train,
        "in_place": in_place,
        "dtype": data.token_dtype,
        "train_tokens": train_tokens,
        "validation_tokens": validation_tokens,
        "tokenizer": f"tokens as given, {corpus.vocab_size} ids",
        "validation_bytes_per_token": None,
    }


def _checked_chunks(
    files: Sequence[SourceFile],
    dtype: np.dtype[Any],
    vocab_size: int,
    start: int,
    stop: int,
) -> Iterator[NDArray[Any]]:
    """Yield the tokens ``start`` to ``stop`` of the joined files, in parts.

    Raises:
        UserError: an id is outside the vocabulary, or a file is one of NumPy.
    """
    before = 0
    for file in files:
        tokens = np.memmap(file.path, dtype, "r") if file.size else np.empty(0, dtype)
        if tokens[:4].tobytes().startswith(b"\x93NUMPY"):
            raise UserError(
                "is a NumPy file with a header",
                file=file.path,
                hint="write the bare numbers with array.tofile",
            )
        end = min(stop - before, len(tokens))
        for first in range(max(start - before, 0), end, _CHUNK_TOKENS):
            chunk = tokens[first : min(first + _CHUNK_TOKENS, end)]
            if int(chunk.max()) >= vocab_size:
                wrong = int(np.argmax(chunk >= vocab_size))
                message = f"token {first + wrong} has id {chunk[wrong]}, but vocab_size is {vocab_size}"
                raise UserError(
                    message, file=file.path, hint="check vocab_size and token_dtype"
                )
            yield chunk
        before += len(tokens)
