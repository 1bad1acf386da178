"""Files to documents, and documents to training and validation text."""

import gzip
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ablate.base.errors import UserError
from ablate.data import documents
from ablate.data.documents import (
    PIECE_CHARACTERS,
    WHOLE_CHARACTERS,
    Documents,
    ValidationSide,
    encoded,
    file_documents,
    hold_out,
)
from ablate.data.sources import find_files


def read(path, content):
    """Write a file and return its documents: JSON lines or text, by its name."""
    path.write_bytes(content)
    (file,) = find_files([str(path)], ())
    return list(file_documents(file, "text" if ".json" in path.name else None))


runs_of_words = st.builds(
    lambda word, count, end: word * count + end,
    st.sampled_from(["x", "é ", "long line with spaces ", "終"]),
    st.integers(1, 9000),
    st.sampled_from(["\n\n", "\n", "", "\r\n \r\n"]),
)


@given(st.lists(runs_of_words, min_size=1, max_size=40).map("".join))
@settings(max_examples=30)
def test_pieces_of_a_long_file_join_to_the_file(tmp_path, text):
    pieces = read(tmp_path / "a.txt", text.encode())
    assert "".join(pieces) == text
    low, high = PIECE_CHARACTERS
    if len(text) <= WHOLE_CHARACTERS:
        assert len(pieces) == 1
    else:
        assert all(low <= len(piece) <= high for piece in pieces[:-1])
        assert len(pieces[-1]) <= high


def test_cuts_are_at_blank_lines_and_do_not_depend_on_the_block_size(
    tmp_path, monkeypatch
):
    paragraph = "one line of text\n" * 100 + " \n"
    content = (paragraph * 60).encode()
    pieces = read(tmp_path / "a.txt", content)
    assert len(pieces) > 5
    assert all(len(piece) % len(paragraph) == 0 for piece in pieces)
    monkeypatch.setattr(documents, "_BLOCK", 1000)
    assert read(tmp_path / "a.txt.gz", gzip.compress(content)) == pieces


def test_bad_bytes_are_replaced_and_a_mark_and_blank_lines_skipped(tmp_path):
    assert read(tmp_path / "a.txt", "na\xefve".encode("latin-1")) == ["na\ufffdve"]
    content = b'\xef\xbb\xbf{"text": "one"}\n\n  \n{"text": "tw\xff"}\r\n{"text": ""}'
    assert read(tmp_path / "a.jsonl", content) == ["one", "tw\ufffd", ""]


NO_TEXT = "no text in field 'text' (fields here: {}; set data.text_field)"
NO_OBJECT = "is not a JSON object (expected one JSON object a line)"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"body": "x", "url": 1}', NO_TEXT.format("body, url")),
        (b'{"text": null}', NO_TEXT.format("text")),
        (b"{}", NO_TEXT.format("none")),
        (b"[1]", NO_OBJECT),
        (b'{"text": "cut', NO_OBJECT),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    with pytest.raises(UserError) as error:
        read(path, b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine"}\n')
    assert str(error.value) == f"{path}:3: {message}"


def test_a_damaged_gzip_is_named_with_the_last_good_line(tmp_path):
    lines = [json.dumps({"text": f"{n} {n**99}"}) for n in range(5000)]
    whole = gzip.compress("\n".join(lines).encode())
    fault = r"a\.json\.gz:\d+: gzip data is damaged after this line: .* \(the download or copy is incomplete"
    with pytest.raises(UserError, match=fault):
        read(tmp_path / "a.json.gz", whole[: len(whole) // 2])
    zeroed = whole[:5000] + b"\0" * 100 + whole[5100:]
    for damaged in (b"no gzip at all", whole[:-3], zeroed):
        with pytest.raises(UserError, match=r"a\.json\.gz:?\d*: gzip data is damaged"):
            read(tmp_path / "a.json.gz", damaged)
    with pytest.raises(UserError, match=r"b\.txt\.gz: gzip data is damaged"):
        read(tmp_path / "b.txt.gz", whole[:1000])


def test_a_line_that_no_memory_could_hold_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_LONGEST_LINE", 1 << 20)
    packed = gzip.compress(b'{"text": "fine"}\n' + b" " * (64 << 20))
    said = r"a\.jsonl\.gz:2: a line of over 1,048,576 characters"
    with pytest.raises(UserError, match=said):
        read(tmp_path / "a.jsonl.gz", packed)


# The split

hash_lists = st.lists(
    st.integers(0, 50).map(lambda n: n * 2**57 + n), min_size=1, max_size=300
)


@given(hash_lists, st.integers(1, 100_000))
def test_the_first_documents_by_hash_are_held_out(values, length):
    hashes = np.array(values, dtype=np.uint64)
    lengths = np.full(len(values), length)
    if len(set(values)) < 2:
        with pytest.raises(UserError, match="too little text for a validation set: 1 "):
            hold_out(hashes, lengths)
        return
    validation = hold_out(hashes, lengths)
    held_out = hashes[validation].tolist()
    assert held_out == sorted(set(values))[: len(held_out)]  # by hash, each once
    assert 0 < len(held_out) < len(set(values))
    assert validation.tolist() == [values.index(value) for value in held_out]


@pytest.mark.parametrize(
    ("num_documents", "share"),
    [(1000, 0.1), (10_000, 384 * 1024 / 1e7), (100_000, 0.015)],
)
def test_the_held_out_share(num_documents, share):
    hashes = np.arange(num_documents, dtype=np.uint64)
    validation = hold_out(hashes, np.full(num_documents, 1000))
    assert len(validation) == pytest.approx(share * num_documents, abs=1.5)


def test_near_copies_share_half_of_their_long_lines(tmp_path):
    lines = [f"line {n:02} ".encode() * 8 for n in range(20)]
    validation = [b"\n".join(lines[:10])]
    train = [
        b"\n".join(lines[:10]) + b"\nnew end",
        b"\n".join(lines[5:15]),
        b"\n".join(lines[6:16]),
        b"  \n".join(lines[10:]),
        b"short\nlines",
        b"",
    ]
    side = ValidationSide(Documents(validation, tmp_path / "validation"))
    assert side.leave_out([*validation, b" " + validation[0], *train]) == (train[2:], 2)
    assert side.leave_out([]) == ([], 0)
    short = ValidationSide(Documents([b"short"], tmp_path / "short"))
    assert short.leave_out([b"short", *train]) == (train, 0)


def test_documents_come_back_whole_up_to_a_limit(tmp_path):
    # JSON can hold lone surrogates
    texts = iter(["one\n", " \n", "", "tw\ud800", "one", "five", "six"])
    read = Documents(encoded(texts, 14), tmp_path / "s")
    assert list(read.texts([2, 0, 1])) == [b"one", b"one\n", b"tw?"]
    assert list(read.texts()) == [b"one\n", b"tw?", b"one", b"five"]
    assert list(texts) == ["six"]
    assert read.hashes[0] == read.hashes[2] != read.hashes[1]
