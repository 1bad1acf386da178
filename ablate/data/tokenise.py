"""Convert files of text to the two token files: list the documents, split, learn the tokeniser, encode.

``prepare`` manages the folder; this module fills it. Training text is processed part by part, in one process
per core, and is written in the order of the source; finished parts are kept. The tokeniser learns from
training documents only: merges learnt on validation text would lower the validation loss unfairly.
"""

from __future__ import annotations

import hashlib
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.base.errors import Problem, UserError
from ablate.data import hub
from ablate.data.documents import json_documents, text_documents
from ablate.data.identity import RULES_VERSION
from ablate.data.kept import key_of, record_of
from ablate.data.parts import (
    Encoding,
    Part,
    PartTable,
    ValidationSide,
    batches,
    cut_into_parts,
    encode,
    encode_part,
    learn_bpe,
    open_tokenizer,
    pick_documents,
    read_part,
    tokens_path,
)
from ablate.data.split import hold_out, line_hashes
from ablate.data.spool import Spool, encoded
from ablate.data.tokenizer import BPE_SAMPLE_BYTES, END_OF_TEXT, open_json
from ablate.data.workers import Job, Workers, num_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from ablate.data.identity import Corpus
    from ablate.data.sources import SourceFile
    from ablate.data.token_files import TokenType
    from ablate.run.config import DataConfig

    Listed = tuple[Part, PartTable]
    OnProgress = Callable[[float, str], None]

# The ends of the stages on the progress bar: a stream waits for the network; tokenising takes most of the
# rest.
_FETCHED, _READ, _HELD_OUT, _LEARNT = 0.3, 0.4, 0.45, 0.5

_COPY_BYTES = 1 << 22
_TRAIN = "train.bin"
_CHECK_PATHS = "check data.paths and data.validation_paths"


def prepare_text(
    data: DataConfig, corpus: Corpus, folder: Path, kept: Path, num_workers: int | None, progress: OnProgress
) -> dict[str, Any]:
    """Write ``train.bin`` and ``validation.bin`` and return their part of ``meta.json``.

    ``kept`` is a folder whose content helps the next attempt if this one is interrupted.
    """
    scratch = folder / "scratch"
    scratch.mkdir()
    parts = _parts(data, corpus, kept, progress)
    with Workers(_num_workers(num_workers, len(parts))) as workers:
        listed = _list_documents(data, parts, kept, workers, progress)
        validation = Spool(scratch / "validation.spool")
        if data.validation_paths:
            validation.fill(encoded(_own_validation(data, corpus, progress), data.max_bytes))
            order = np.arange(len(validation.lengths))
        else:
            validation.fill(_held_out(listed, scratch / "held-out.hashes", workers, progress))
            order = np.argsort(validation.hashes)
        if not len(order):
            raise UserError(Problem(what="there is no validation text", hint=_CHECK_PATHS))
        side = _write_side(validation, scratch)
        dtype: TokenType = "uint16" if corpus.identity.vocab_size <= 1 << 16 else "uint32"
        encoding, description = _encoding(data, corpus, dtype, listed, side, folder, progress)
        total = validation.num_bytes + sum(table.num_bytes for _, table in listed)
        report = _stage(progress, _LEARNT, 1.0, "tokenising", total)
        validation_tokens = _encode_validation(
            validation.texts(order), encoding, folder / "validation.bin", report
        )
        train = _encode_train(
            listed, side, encoding, kept, workers, lambda units: report(validation.num_bytes + units)
        )
    near = train["near_copies"]
    if not train["documents"]:
        what = "all training text is nearly the same as" if near else "there is no training text but"
        raise UserError(Problem(what=f"{what} validation text", hint=_CHECK_PATHS))
    (kept / _TRAIN).replace(folder / "train.bin")
    shutil.rmtree(scratch)
    own_sides = train["documents"] + near + (0 if data.validation_paths else len(order))
    return {
        "train": "train.bin",
        "validation": "validation.bin",
        "in_place": None,
        "dtype": dtype,
        "train_tokens": train["tokens"],
        "validation_tokens": validation_tokens,
        "tokenizer": description,
        "validation_bytes_per_token": validation.num_bytes / validation_tokens,
        "train_bytes": train["text_bytes"],
        "validation_bytes": validation.num_bytes,
        "train_documents": train["documents"],
        "validation_documents": len(order),
        "copies_left_out": sum(table.num_documents for _, table in listed) - own_sides,
        "near_copies_left_out": near,
    }


def _num_workers(wanted: int | None, num_parts: int) -> int:
    """Return the number of processes to start: 0 for a single part, whose tokeniser has its own threads."""
    workers = min(wanted or num_cores(), num_parts)
    return workers if workers > 1 else 0


def _parts(data: DataConfig, corpus: Corpus, kept: Path, progress: OnProgress) -> list[Part]:
    """Return the parts of the training text in reading order."""
    text_field: str | None
    if corpus.hub:
        report = _stage(progress, 0.0, _FETCHED, "reading the data set", corpus.identity.num_bytes)
        key, text_field = corpus.identity.digest, hub.SHARD_FIELD
        files = hub.fetch(corpus.hub, data.text_field, data.max_bytes, kept, report, key=key)
    else:
        files = list(zip(corpus.train, corpus.train_hashes, strict=True))
        text_field = data.text_field if data.source == "jsonl" else None
        if data.source != "jsonl":
            # Sorted by a hash of the name, so that ``max_bytes`` takes a mixture, not the first letters.
            files.sort(key=lambda entry: _mixed(entry[0]))
    return cut_into_parts(files, text_field, RULES_VERSION)


def _mixed(file: SourceFile) -> bytes:
    return hashlib.sha256(file.name.encode()).digest()


def _list_documents(
    data: DataConfig, parts: Sequence[Part], kept: Path, workers: Workers, progress: OnProgress
) -> list[Listed]:
    """List the documents of the parts until they total ``max_bytes`` of text.

    A list ends at the end of its part or at ``max_bytes``, whichever comes first. So it is the same for
    any number of workers, and only the last one is cut here.
    """
    listed: list[Listed] = []
    total = sum(part.num_bytes for part in parts)
    report = _stage(progress, _FETCHED, _READ, "reading text", min(total, data.max_bytes or total))
    jobs = [Job(function=read_part, arguments=(part, data.max_bytes, kept)) for part in parts]
    left = data.max_bytes
    tables = workers.run(jobs, report)
    for part, table in zip(parts, tables, strict=False):
        if left is not None and table.num_bytes >= left:
            listed.append((part, table.cut(left)))
            break
        listed.append((part, table))
        left = None if left is None else left - table.num_bytes
    tables.close()
    return listed


def _own_validation(data: DataConfig, corpus: Corpus, progress: OnProgress) -> Iterator[str]:
    def report(_units: int) -> None:
        progress(_READ, "reading validation text")

    if corpus.hub:
        split = corpus.hub.validation_split
        assert split is not None
        for document in hub.documents(corpus.hub, split, data.text_field):
            yield document
            report(0)
        return
    by_name = data.source == "jsonl"
    for file in corpus.validation if by_name else sorted(corpus.validation, key=_mixed):
        yield from json_documents(file, data.text_field, report) if by_name else text_documents(file, report)


def _held_out(
    listed: Sequence[Listed], wanted: Path, workers: Workers, progress: OnProgress
) -> Iterator[bytes]:
    """Yield each document of the validation side once, in the order of the source."""
    read = [table.read() for _, table in listed]
    hashes = np.concatenate([np.empty(0, np.uint64), *(entry[0] for entry in read)])
    lengths = np.concatenate([np.empty(0, np.int64), *(entry[1] for entry in read)])
    _, held_out = hold_out(hashes, lengths)
    hashes[held_out].astype("<u8").tofile(wanted)  # in ascending order
    jobs = [Job(function=pick_documents, arguments=(part, table, wanted)) for part, table in listed]
    total = sum(part.num_bytes for part, _ in listed)
    report = _stage(progress, _READ, _HELD_OUT, "holding out validation text", total)
    seen: set[int] = set()
    for documents in workers.run(jobs, report):
        for key, text in documents:
            if key not in seen:
                seen.add(key)
                yield text


def _write_side(validation: Spool, folder: Path) -> ValidationSide:
    everything = np.arange(len(validation.lengths))
    documents, lines = np.unique(validation.hashes), line_hashes(validation.texts(everything))
    paths = folder / "documents.hashes", folder / "lines.hashes"
    for path, hashes in zip(paths, (documents, lines), strict=True):
        hashes.astype("<u8").tofile(path)
    key = key_of([hashlib.sha256(path.read_bytes()).hexdigest() for path in paths])
    return ValidationSide(documents=paths[0], lines=paths[1], key=key)


def _encoding(
    data: DataConfig,
    corpus: Corpus,
    dtype: TokenType,
    listed: Sequence[Listed],
    side: ValidationSide,
    folder: Path,
    progress: OnProgress,
) -> tuple[Encoding, str]:
    """Return the encoding and its description; write ``tokenizer.json``, learnt or given, to the folder."""
    if data.tokenizer == "bytes":
        return Encoding(tokenizer=None, end_of_text="", dtype=dtype, key=key_of(["bytes", dtype])), "bytes"
    if corpus.hf:
        key = key_of([corpus.hf.identity(), dtype])
        description = f"{corpus.hf.name}, {corpus.hf.vocab_size} tokens"
        path, end_of_text = corpus.hf.json_path, corpus.hf.end_of_text
        encoding = Encoding(tokenizer=path, end_of_text=end_of_text, dtype=dtype, key=key)
        open_json(path, end_of_text).save(folder)
        return encoding, description
    sample_bytes = min(BPE_SAMPLE_BYTES, sum(table.num_bytes for _, table in listed))
    report = _stage(progress, _HELD_OUT, _LEARNT, "learning the BPE", sample_bytes)
    job = Job(function=learn_bpe, arguments=(listed, side, corpus.identity.vocab_size, folder))
    # In a separate process, because the library learns for minutes without reacting to Ctrl-C.
    with Workers(1) as worker:
        (num_tokens,) = worker.run([job], report)
    path = folder / "tokenizer.json"
    key = key_of([hashlib.sha256(path.read_bytes()).hexdigest(), dtype])
    encoding = Encoding(tokenizer=path, end_of_text=END_OF_TEXT, dtype=dtype, key=key)
    return encoding, f"byte-level BPE, {num_tokens} tokens"


def _encode_validation(
    texts: Iterator[bytes], encoding: Encoding, path: Path, report: Callable[[int], None]
) -> int:
    """Write the validation tokens and return their number."""
    tokenizer = open_tokenizer(encoding)
    count = done = 0
    with path.open("wb") as file:
        for batch in batches(texts):
            ids = encode(tokenizer, batch, encoding.dtype)
            ids.tofile(file)
            count += len(ids)
            done += sum(map(len, batch))
            report(done)
    return count


def _encode_train(
    listed: Sequence[Listed],
    side: ValidationSide,
    encoding: Encoding,
    kept: Path,
    workers: Workers,
    report: Callable[[int], None],
) -> dict[str, int]:
    """Write the training tokens to ``kept / train.bin`` and return the sums over the parts' records.

    Parts are appended in order and then removed, so that the disk never holds the tokens twice. The
    records stay and tell the next attempt how much of the file is valid.
    """
    paths = [
        tokens_path(number, part, table, side, encoding, kept) for number, (part, table) in enumerate(listed)
    ]
    with (kept / _TRAIN).open("a+b") as file:
        records = _appended(file, paths)
        done = sum(table.num_bytes for _, table in listed[: len(records)])
        jobs = [
            Job(function=encode_part, arguments=(number, *listed[number], side, encoding, kept))
            for number in range(len(records), len(listed))
        ]
        for record in workers.run(jobs, lambda units: report(done + units)):
            path = paths[len(records)]
            with path.open("rb") as tokens:
                shutil.copyfileobj(tokens, file, _COPY_BYTES)
            file.flush()
            path.unlink()
            records.append(record)
    counted = ("tokens", "documents", "text_bytes", "near_copies")
    return {name: sum(record[name] for record in records) for name in counted}


def _appended(file: BinaryIO, paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the records of the parts at the start of the file, and truncate the file after them."""
    records: list[dict[str, Any]] = []
    end = 0
    for path in paths:
        record = record_of(path)
        if record is None or _hash_of_next(file, end, record["bytes"]) != record["sha256"]:
            break
        records.append(record)
        end += record["bytes"]
    file.truncate(end)
    return records


def _hash_of_next(file: BinaryIO, start: int, size: int) -> str:
    file.seek(start)
    digest = hashlib.sha256()
    while size and (block := file.read(min(size, _COPY_BYTES))):
        digest.update(block)
        size -= len(block)
    return digest.hexdigest()


def _stage(progress: OnProgress, low: float, high: float, what: str, total: int) -> Callable[[int], None]:
    """Return a callback that converts the units done in one stage to the overall fraction."""

    def report(done: int) -> None:
        progress(low + (high - low) * min(1.0, done / max(1, total)), what)

    return report
