"""Convert files of text to the two token files: list the documents, split, learn the tokeniser, encode.

``prepare`` manages the folder; this module fills it. Training text is processed part by part, in one process
per core, and is written in the order of the source; finished parts are kept. The tokeniser learns from
training documents only: merges learnt on validation text would lower the validation loss unfairly.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.base.errors import UserError
from ablate.data import hub
from ablate.data.cache import key_of, record_of
from ablate.data.documents import file_documents
from ablate.data.identity import RULES_VERSION
from ablate.data.parts import (
    Encoding,
    Listed,
    Part,
    ValidationSide,
    batches,
    cut_into_parts,
    encode_part,
    learn_bpe,
    pick_documents,
    read_part,
    tokens_path,
)
from ablate.data.split import Spool, encoded, hold_out, line_hashes
from ablate.data.tokenizer import BPE_SAMPLE_BYTES, END_OF_TEXT, open_json
from ablate.data.workers import Workers, num_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from ablate.data.identity import Corpus
    from ablate.data.sources import SourceFile
    from ablate.data.workers import Report
    from ablate.run.config import DataConfig

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
    work = _Work(data=data, corpus=corpus, folder=folder, kept=kept, progress=progress)
    parts = work.parts()
    processes = min(num_workers or num_cores(), len(parts))
    # A single part is processed here, by the tokeniser's own threads.
    with Workers(processes if processes > 1 else 0) as workers:
        listed = work.list_documents(parts, workers)
        validation = Spool(scratch / "validation.spool")
        if data.validation_paths:
            validation.fill(encoded(work.own_validation(), data.max_bytes))
            order = np.arange(len(validation.lengths))
        else:
            validation.fill(work.held_out(listed, scratch / "held-out.hashes", workers))
            order = np.argsort(validation.hashes)
        if not len(order):
            raise UserError("there is no validation text", hint=_CHECK_PATHS)
        side = _write_side(validation, scratch)
        dtype = "uint16" if corpus.identity.vocab_size <= 1 << 16 else "uint32"
        encoding, description = work.encoding(dtype, listed, side)
        total = validation.num_bytes + sum(one.num_bytes for one in listed)
        report = work.stage(_LEARNT, 1.0, "tokenising", total)
        validation_tokens = _encode_validation(
            validation.texts(order), encoding, folder / "validation.bin", report
        )
        paths = [tokens_path(number, one, side, encoding, kept) for number, one in enumerate(listed)]
        jobs = [
            partial(encode_part, path, one, side, encoding) for path, one in zip(paths, listed, strict=True)
        ]
        with (kept / _TRAIN).open("a+b") as file:
            records = _appended(file, paths)
            done = validation.num_bytes + sum(one.num_bytes for one in listed[: len(records)])
            for record in workers.run(jobs[len(records) :], lambda units: report(done + units)):
                _append(file, paths[len(records)])
                records.append(record)
    counts = {
        name: sum(record[name] for record in records)
        for name in ("tokens", "documents", "text_bytes", "near_copies")
    }
    near = counts["near_copies"]
    if not counts["documents"]:
        what = "all training text is nearly the same as" if near else "there is no training text but"
        raise UserError(f"{what} validation text", hint=_CHECK_PATHS)
    (kept / _TRAIN).replace(folder / "train.bin")
    shutil.rmtree(scratch)
    own_sides = counts["documents"] + near + (0 if data.validation_paths else len(order))
    return {
        "train": "train.bin",
        "validation": "validation.bin",
        "in_place": None,
        "dtype": dtype,
        "train_tokens": counts["tokens"],
        "validation_tokens": validation_tokens,
        "tokenizer": description,
        "validation_bytes_per_token": validation.num_bytes / validation_tokens,
        "train_bytes": counts["text_bytes"],
        "validation_bytes": validation.num_bytes,
        "train_documents": counts["documents"],
        "validation_documents": len(order),
        "copies_left_out": sum(one.num_documents for one in listed) - own_sides,
        "near_copies_left_out": near,
    }


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What all stages of a preparation need."""

    data: DataConfig
    corpus: Corpus
    folder: Path
    kept: Path
    progress: OnProgress

    def stage(self, low: float, high: float, what: str, total: int) -> Report:
        """Return a callback that converts the units done in one stage to the overall fraction."""
        return lambda done: self.progress(low + (high - low) * min(1.0, done / max(1, total)), what)

    def parts(self) -> list[Part]:
        """Return the parts of the training text in reading order."""
        data, corpus = self.data, self.corpus
        if corpus.hub:
            report = self.stage(0.0, _FETCHED, "reading the data set", corpus.identity.num_bytes)
            files = hub.fetch(corpus.hub, data, self.kept, report, key=corpus.identity.digest)
            return cut_into_parts(files, hub.SHARD_FIELD, RULES_VERSION)
        files = list(zip(corpus.train, corpus.train_hashes, strict=True))
        if data.source == "jsonl":
            return cut_into_parts(files, data.text_field, RULES_VERSION)
        # Sorted by a hash of the name, so that ``max_bytes`` takes a mixture, not the first letters.
        files.sort(key=lambda entry: _mixed(entry[0]))
        return cut_into_parts(files, None, RULES_VERSION)

    def list_documents(self, parts: Sequence[Part], workers: Workers) -> list[Listed]:
        """List the documents of the parts until they total ``max_bytes`` of text.

        A list ends at the end of its part or at ``max_bytes``, whichever comes first. So it is the same for
        any number of workers, and only the last one is cut here.
        """
        left = self.data.max_bytes
        total = sum(part.num_bytes for part in parts)
        report = self.stage(_FETCHED, _READ, "reading text", min(total, left or total))
        tables = workers.run([partial(read_part, part, left, self.kept) for part in parts], report)
        listed: list[Listed] = []
        for table in tables:
            if left is not None and table.num_bytes >= left:
                listed.append(table.cut(left))
                break
            listed.append(table)
            left = None if left is None else left - table.num_bytes
        tables.close()
        return listed

    def own_validation(self) -> Iterator[str]:
        """Yield the documents of the user's own validation text."""
        data, corpus = self.data, self.corpus
        report = self.stage(_READ, _READ, "reading validation text", 1)
        if corpus.hub:
            split = corpus.hub.validation_split
            assert split is not None
            for document in hub.documents(corpus.hub, split, data.text_field):
                yield document
                report(0)
        elif data.source == "jsonl":
            for file in corpus.validation:
                yield from file_documents(file, data.text_field, report)
        else:
            for file in sorted(corpus.validation, key=_mixed):
                yield from file_documents(file, None, report)

    def held_out(self, listed: Sequence[Listed], wanted: Path, workers: Workers) -> Iterator[bytes]:
        """Yield each document of the validation side once, in the order of the source."""
        read = [one.read() for one in listed]
        hashes = np.concatenate([hashes for hashes, _ in read])
        lengths = np.concatenate([lengths for _, lengths in read])
        _, held_out = hold_out(hashes, lengths)
        hashes[held_out].astype("<u8").tofile(wanted)  # in ascending order
        total = sum(one.part.num_bytes for one in listed)
        report = self.stage(_READ, _HELD_OUT, "holding out validation text", total)
        seen: set[int] = set()
        jobs = [partial(pick_documents, one, wanted) for one in listed]
        for documents in workers.run(jobs, report):
            for key, text in documents:
                if key not in seen:
                    seen.add(key)
                    yield text

    def encoding(self, dtype: str, listed: Sequence[Listed], side: ValidationSide) -> tuple[Encoding, str]:
        """Return the encoding and its description; write its ``tokenizer.json`` to the folder."""
        path, end_of_text, description = None, "", "bytes"
        content: object = description
        if hf := self.corpus.hf:
            path, end_of_text, content = hf.json_path, hf.end_of_text, hf.identity()
            description = f"{hf.name}, {hf.vocab_size} tokens"
            open_json(path, end_of_text).save(self.folder)
        elif self.data.tokenizer == "bpe":
            sample_bytes = min(BPE_SAMPLE_BYTES, sum(one.num_bytes for one in listed))
            report = self.stage(_HELD_OUT, _LEARNT, "learning the BPE", sample_bytes)
            learn = partial(learn_bpe, listed, side, self.corpus.identity.vocab_size, self.folder)
            # In a separate process, because the library learns for minutes without reacting to Ctrl-C.
            with Workers(1) as worker:
                (num_tokens,) = worker.run([learn], report)
            path, end_of_text = self.folder / "tokenizer.json", END_OF_TEXT
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            description = f"byte-level BPE, {num_tokens} tokens"
        key = key_of([content, dtype])
        return Encoding(tokenizer=path, end_of_text=end_of_text, dtype=dtype, key=key), description


def _mixed(file: SourceFile) -> bytes:
    return hashlib.sha256(file.name.encode()).digest()


def _write_side(validation: Spool, folder: Path) -> ValidationSide:
    everything = np.arange(len(validation.lengths))
    documents, lines = np.unique(validation.hashes), line_hashes(validation.texts(everything))
    paths = folder / "documents.hashes", folder / "lines.hashes"
    for path, hashes in zip(paths, (documents, lines), strict=True):
        hashes.astype("<u8").tofile(path)
    key = key_of([hashlib.sha256(path.read_bytes()).hexdigest() for path in paths])
    return ValidationSide(documents=paths[0], lines=paths[1], key=key)


def _encode_validation(texts: Iterator[bytes], encoding: Encoding, path: Path, report: Report) -> int:
    """Write the validation tokens and return their number."""
    count = done = 0
    with path.open("wb") as file:
        for batch in batches(texts):
            ids = encoding.encode(batch)
            ids.tofile(file)
            count += len(ids)
            done += sum(map(len, batch))
            report(done)
    return count


def _append(file: BinaryIO, path: Path) -> None:
    """Append a part's tokens and remove them, so that the disk never holds the tokens twice.

    The record stays and tells the next attempt how much of the file is valid.
    """
    with path.open("rb") as tokens:
        shutil.copyfileobj(tokens, file, _COPY_BYTES)
    file.flush()
    path.unlink()


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
