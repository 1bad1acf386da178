import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ablate.base.errors import UserError
from ablate.data import documents
from ablate.data.documents import PIECE_CHARACTERS, WHOLE_CHARACTERS, file_documents
from ablate.data.sources import find_files


def source(path):
    (file,) = find_files([str(path)], ())
    return file


def read_text(path, content):
    path.write_bytes(content)
    return list(file_documents(source(path), None, lambda _n: None))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["x", "é ", "long line with spaces ", "終"]),
            st.integers(1, 9000),
            st.sampled_from(["\n\n", "\n", "", "\r\n \r\n"]),
        ),
        min_size=1,
        max_size=40,
    )
)
@settings(max_examples=30)
def test_pieces_of_a_long_file_join_to_the_file(tmp_path, parts):
    text = "".join(piece * count + end for piece, count, end in parts)
    pieces = read_text(tmp_path / "a.txt", text.encode())
    assert "".join(pieces) == text
    if len(text) <= WHOLE_CHARACTERS:
        assert len(pieces) == 1
    else:
        low, high = PIECE_CHARACTERS
        assert all(low <= len(piece) <= high for piece in pieces[:-1])
        assert len(pieces[-1]) <= high


def test_cuts_are_at_blank_lines_and_do_not_depend_on_the_block_size(tmp_path, monkeypatch):
    paragraph = "one line of text\n" * 100 + " \n"
    content = (paragraph * 60).encode()
    pieces = read_text(tmp_path / "a.txt", content)
    assert len(pieces) > 5
    assert all(len(piece) % len(paragraph) == 0 for piece in pieces)
    monkeypatch.setattr(documents, "_BLOCK", 1000)
    assert read_text(tmp_path / "a.txt", content) == pieces


def test_text_that_is_no_utf8_is_decoded_with_replacement(tmp_path):
    assert read_text(tmp_path / "a.txt", "na\xefve".encode("latin-1")) == ["na\ufffdve"]


def test_text_may_be_compressed_and_progress_is_told(tmp_path):
    content = bytes(range(32, 127)) * 30_000
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(content))
    seen = []
    assert "".join(file_documents(source(path), None, seen.append)).encode() == content
    assert seen == sorted(seen)
    assert seen[-1] == path.stat().st_size


def read_json(path, content):
    path.write_bytes(content)
    return list(file_documents(source(path), "text", lambda _n: None))


def test_json_lines_with_a_mark_blank_lines_and_bad_bytes(tmp_path):
    content = b'\xef\xbb\xbf{"text": "one"}\n\n  \n{"text": "tw\xff"}\r\n{"text": ""}'
    assert read_json(tmp_path / "a.jsonl", content) == ["one", "tw\ufffd", ""]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"body": "x", "url": 1}', "no text in field 'text' (fields here: body, url; set data.text_field)"),
        (b'{"text": null}', "no text in field 'text' (fields here: text; set data.text_field)"),
        (b"{}", "no text in field 'text' (fields here: none; set data.text_field)"),
        (b"[1]", "is not a JSON object (expected one JSON object a line)"),
        (b'{"text": "cut', "is not a JSON object (expected one JSON object a line)"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    with pytest.raises(UserError) as error:
        read_json(path, b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine"}\n')
    assert str(error.value) == f"{path}:3: {message}"


def test_a_damaged_gzip_is_named_with_the_last_good_line(tmp_path):
    lines = "".join(json.dumps({"text": f"{n} " + str(n**99)}) + "\n" for n in range(5000)).encode()
    whole = gzip.compress(lines)
    path = tmp_path / "a.json.gz"
    with pytest.raises(UserError) as error:
        read_json(path, whole[: len(whole) // 2])
    text = str(error.value)
    file, line, rest = text.rsplit(".gz:", 1)[0], *text.rsplit(".gz:", 1)[1].split(":", 1)
    assert file + ".gz" == str(path)
    assert 0 < int(line) < 5000
    assert "gzip data is damaged after this line" in rest
    assert rest.endswith("(the download or copy is incomplete; fetch the file again)")
    for damaged in (b"no gzip at all", whole[:-3], whole[:5000] + b"\0" * 100 + whole[5100:]):
        with pytest.raises(UserError, match=r"a\.json\.gz:?\d*: gzip data is damaged"):
            read_json(path, damaged)
    with pytest.raises(UserError, match=r"b\.txt\.gz: gzip data is damaged"):
        read_text(tmp_path / "b.txt.gz", whole[:1000])


def test_a_line_that_no_memory_could_hold_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_LONGEST_LINE", 1 << 20)
    packed = gzip.compress(b'{"text": "fine"}\n' + b" " * (64 << 20))
    assert len(packed) < 100_000
    with pytest.raises(UserError, match=r"a\.jsonl\.gz:2: a line of over 1,048,576 bytes"):
        read_json(tmp_path / "a.jsonl.gz", packed)


def test_a_file_that_vanished_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}')
    file = source(path)
    path.unlink()
    with pytest.raises(UserError, match=r"a\.jsonl: cannot read: No such file"):
        list(file_documents(file, "text", lambda _n: None))
