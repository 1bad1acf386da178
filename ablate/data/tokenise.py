"""Convert files of text to the two token files: list the documents, split, learn the tokeniser, encode.

``prepare`` manages the folder; this module fills it. Each of these steps reads the text again: that takes a
thirtieth of the tokenising time, and a second copy of a large corpus would not fit on many disks. The
tokeniser uses all cores by threads of its own; while it works, other threads read and look for near copies.
Training tokens are written in the order of the source, in pieces, so an interrupted preparation continues
after the last complete piece. The tokeniser learns from training documents only: merges learnt on validation
text would lower the validation loss unfairly.

A tokeniser is bytes, a BPE trained on the training text, or one of Hugging Face. Every document is followed
by the end-of-text token. For bytes that is byte 0, so the vocabulary is 256; a NUL inside a text becomes
U+FFFD. The others have a special token that text cannot produce: its literal spelling in a document is
tokenised as ordinary text.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.base.errors import UserError
from ablate.base.files import append_line, parse_json
from ablate.data import hub
from ablate.data.documents import Documents, ValidationSide, encoded, file_documents, hold_out
from ablate.data.sources import stat_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from ablate.data.identity import Corpus
    from ablate.run.config import DataConfig

    OnProgress = Callable[[float, str], None]
    Encoded = tuple[bytes, dict[str, int]]

# Progress at the end of each stage: a stream waits for the network; tokenising takes most of the rest.
_FETCHED, _READ, _HELD_OUT, _LEARNT = 0.3, 0.4, 0.45, 0.5

PIECE_BYTES = 16 << 20
"""Bytes of text in a piece: a kill can lose that much, which is some seconds of a core's work."""
_BATCH_BYTES = 1 << 19
_AT_ONCE = 3
_CHECK_PATHS = "check data.paths and data.validation_paths"


END_OF_TEXT = "<|endoftext|>"
BPE_SAMPLE_BYTES = 64 << 20
"""Merges are learnt from this many bytes at the start of the training text: more would change few of them."""

_NUL_INSTEAD = "\N{REPLACEMENT CHARACTER}".encode()


class ByteTokenizer:
    """A tokeniser whose ids are the byte values."""

    def encode(self, texts: Sequence[bytes]) -> NDArray[Any]:
        """Join the bytes of all texts as uint8, each text followed by 0."""
        joined = b"".join(text.replace(b"\0", _NUL_INSTEAD) + b"\0" for text in texts)
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
        encodings = self._tokenizer.encode_batch_fast(
            [text.decode("utf-8", "replace") for text in texts], add_special_tokens=False
        )
        end = [self._end_id]
        return np.concatenate([np.array(ids + end, dtype=np.uint32) for ids in (e.ids for e in encodings)])

    def save(self, folder: Path) -> Path:
        """Write ``tokenizer.json``, which decodes the tokens, beside them; return its path."""
        path = folder / "tokenizer.json"
        self._tokenizer.save(str(path))
        return path


Tokenizer = ByteTokenizer | JsonTokenizer


def train_bpe(texts: Iterable[bytes], vocab_size: int) -> JsonTokenizer:
    """Train a byte-level BPE. The same texts give the same tokeniser.

    A small corpus can run out of pairs before ``vocab_size``; the remaining ids then never occur.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    backend.train_from_iterator((text.decode("utf-8", "replace") for text in texts), trainer)
    return JsonTokenizer(backend, END_OF_TEXT)


def open_json(path: Path, end_of_text: str) -> JsonTokenizer:
    """Open a ``tokenizer.json`` of a BPE, or one found by ``hub.find_tokenizer``."""
    from tokenizers import Tokenizer as Backend

    return JsonTokenizer(Backend.from_file(str(path)), end_of_text)


def prepare_text(data: DataConfig, corpus: Corpus, folder: Path, progress: OnProgress) -> dict[str, Any]:
    """Write ``train.bin`` and ``validation.bin`` and return their part of ``meta.json``.

    Continues from what an interrupted attempt left in ``scratch/``, which is removed at the end.
    """
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    text_field = data.text_field if data.source == "jsonl" else None
    files, validation_files = list(corpus.train), list(corpus.validation)
    if corpus.hub:
        size = max(1, corpus.identity.num_bytes)

        def report_fetched(done: int) -> None:
            progress(_FETCHED * min(1.0, done / size), "reading the data set")

        files = [hub.fetch(corpus.hub, data, scratch, report_fetched)]
        text_field = hub.FETCHED_FIELD
    elif text_field is None:  # so that ``max_bytes`` takes a mixture, not the first letters
        for mixed in (files, validation_files):
            mixed.sort(key=lambda file: hashlib.sha256(file.name.encode()).digest())

    def training_text() -> Iterator[bytes]:
        return encoded((text for file in files for text in file_documents(file, text_field)), data.max_bytes)

    progress(_FETCHED, "reading text")
    listed = Documents(training_text())
    spool = scratch / "validation.txt"
    progress(_READ, "reading validation text" if data.validation_paths else "holding out validation text")
    if data.validation_paths:
        own: Iterable[str] = (text for file in validation_files for text in file_documents(file, text_field))
        if corpus.hub:
            own = hub.documents(corpus.hub, data.validation_paths[0], data.text_field)
        validation = Documents(encoded(own, data.max_bytes), spool)
        order = list(range(len(validation.lengths)))
        if not order:
            raise UserError("there is no validation text", hint=_CHECK_PATHS)
    else:
        chosen = set(hold_out(listed.hashes, listed.lengths).tolist())
        texts = (text for number, text in enumerate(training_text()) if number in chosen)
        validation = Documents(texts, spool)
        order = np.argsort(validation.hashes).tolist()
    side = ValidationSide(validation)

    tokenizer: Tokenizer = ByteTokenizer()
    description, tokenizer_json = "bytes", b""
    if hf := corpus.hf:
        tokenizer = open_json(hf.json_path, hf.end_of_text)
        description = f"{hf.name}, {hf.vocab_size} tokens"
    elif data.tokenizer == "bpe":
        progress(_HELD_OUT, "learning the BPE")
        tokenizer = _learn_bpe(training_text(), side, corpus.identity.vocab_size)
        description = f"byte-level BPE, {tokenizer.vocab_size} tokens"
    if isinstance(tokenizer, JsonTokenizer):
        tokenizer_json = tokenizer.save(folder).read_bytes()

    dtype = np.dtype("<u2" if corpus.identity.vocab_size <= 1 << 16 else "<u4")
    validation_bytes = int(validation.lengths.sum())
    total = validation_bytes + int(listed.lengths.sum())

    def report(done: int) -> None:
        progress(_LEARNT + (1 - _LEARNT) * min(1.0, done / total), "tokenising")

    validation_tokens = done = 0
    with (folder / "validation.bin").open("wb") as file:
        for batch in _batches(validation.texts(order)):
            ids = tokenizer.encode(batch)
            ids.astype(dtype).tofile(file)
            validation_tokens += len(ids)
            done += sum(map(len, batch))
            report(done)
    key = hashlib.sha256(tokenizer_json + side.documents.tobytes() + side.lines.tobytes()).hexdigest()
    train = Pieces(folder / "train.bin", scratch / "train.pieces", key)
    made, counts = bytearray(), Counter[str]()

    def write_piece() -> None:
        for file in files:  # pieces made from files that changed since they were hashed would be kept
            now = stat_file(file.path, file.name)
            if (now.size, now.mtime_ns) != (file.size, file.mtime_ns):
                hint = "run again when nothing writes to it"
                raise UserError("the corpus changed while it was read", file=file.path, hint=hint)
        train.append(bytes(made), **counts)
        made.clear()
        counts.clear()

    unread = islice(training_text(), train.totals["read"], None)
    for tokens, more in _in_threads(partial(_encode_training, tokenizer, side, dtype), _batches(unread)):
        made += tokens
        counts.update(more)
        report(done + train.totals["read_bytes"] + counts["read_bytes"])
        if counts["read_bytes"] >= PIECE_BYTES:
            write_piece()
    if counts:
        write_piece()
    documents, near = train.totals["documents"], train.totals["near_copies"]
    if not documents:
        what = "all training text is nearly the same as" if near else "there is no training text but"
        raise UserError(f"{what} validation text", hint=_CHECK_PATHS)
    shutil.rmtree(scratch)
    own_sides = documents + near + (0 if data.validation_paths else len(order))
    return {
        "train": "train.bin",
        "validation": "validation.bin",
        "in_place": None,
        "dtype": dtype.name,
        "train_tokens": train.totals["bytes"] // dtype.itemsize,
        "validation_tokens": validation_tokens,
        "tokenizer": description,
        "validation_bytes_per_token": validation_bytes / validation_tokens,
        "train_bytes": train.totals["text_bytes"],
        "validation_bytes": validation_bytes,
        "train_documents": documents,
        "validation_documents": len(order),
        "copies_left_out": len(listed.lengths) - own_sides,
        "near_copies_left_out": near,
    }


def _batches(texts: Iterable[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _learn_bpe(texts: Iterator[bytes], side: ValidationSide, vocab_size: int) -> JsonTokenizer:
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


def _encode_training(
    tokenizer: Tokenizer, side: ValidationSide, dtype: np.dtype[Any], texts: Sequence[bytes]
) -> Encoded:
    """Return the tokens of the training documents among ``texts`` as bytes, and what ``Pieces`` counts."""
    training, near_copies = side.leave_out(texts)
    counts = {"read": len(texts), "read_bytes": sum(map(len, texts)), "documents": len(training)}
    counts |= {"text_bytes": sum(map(len, training)), "near_copies": near_copies}
    return tokenizer.encode(training).astype(dtype).tobytes() if training else b"", counts


def _in_threads(
    encode: Callable[[list[bytes]], Encoded], batches: Iterable[list[bytes]]
) -> Iterator[Encoded]:
    """Encode a few batches at once; yield the results in the order of the batches."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        waiting: deque[Future[Encoded]] = deque()
        for batch in batches:
            waiting.append(pool.submit(encode, batch))
            if len(waiting) > _AT_ONCE:
                yield waiting.popleft().result()
        for future in waiting:
            yield future.result()


class Pieces:
    """A file that grows piece by piece, so that an interrupted preparation continues after the last piece.

    A journal beside it records each piece's size and hash. When the file is opened again, it is cut after the
    last piece that agrees with the journal and was written under the same ``key``. ``totals`` sums the
    records' counts.
    """

    def __init__(self, path: Path, journal: Path, key: str) -> None:
        self.totals = Counter[str]()
        self._path, self._journal, self._key = path, journal, key
        known = journal.read_bytes().splitlines() if journal.exists() else []
        journal.unlink(missing_ok=True)
        with path.open("a+b") as file, suppress(ValueError, KeyError, TypeError):
            file.seek(0)
            for line in known:
                record = parse_json(line)
                piece = file.read(record["counts"]["bytes"])
                if record["key"] != key or record["sha256"] != hashlib.sha256(piece).hexdigest():
                    break
                self._note(record)
        with path.open("r+b") as file:
            file.truncate(self.totals["bytes"])

    def append(self, piece: bytes, **counts: int) -> None:
        """Write one piece and its record."""
        with self._path.open("ab") as file:
            file.write(piece)
        counts |= {"bytes": len(piece), "pieces": 1}
        self._note({"key": self._key, "sha256": hashlib.sha256(piece).hexdigest(), "counts": counts})

    def _note(self, record: dict[str, Any]) -> None:
        append_line(self._journal, record)
        self.totals.update(record["counts"])
