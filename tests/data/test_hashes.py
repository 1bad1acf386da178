import hashlib
import os

import pytest

from ablate.base.errors import UserError
from ablate.data import hashes
from ablate.data.sources import find_files


@pytest.fixture
def corpus(tmp_path, write_texts, age):
    folder = write_texts(tmp_path / "corpus")
    age(folder)
    return folder


@pytest.fixture
def no_racy_window(monkeypatch):
    """Remember new files too: the change time of a test's file cannot be set back."""
    monkeypatch.setattr(hashes, "_RACY_NS", -(1 << 62))


def run(folder):
    return hashes.content_hashes(find_files([str(folder)], (".txt",)), "key")


@pytest.fixture
def reads(monkeypatch):
    """Return the list of paths that were hashed."""
    seen = []
    real = hashes._hash
    monkeypatch.setattr(hashes, "_hash", lambda path: seen.append(path) or real(path))
    return seen


def test_hashes_are_of_the_content(corpus):
    expected = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(corpus.iterdir())]
    assert run(corpus) == expected


@pytest.mark.usefixtures("no_racy_window")
def test_the_second_time_nothing_is_read(corpus, reads):
    first = run(corpus)
    assert len(reads) == 60
    assert run(corpus) == first
    assert len(reads) == 60


@pytest.mark.usefixtures("no_racy_window")
def test_only_a_changed_file_is_read_again(corpus, reads):
    first = run(corpus)
    (corpus / "007.txt").write_text("other")
    second = run(corpus)
    assert reads[60:] == [str(corpus / "007.txt")]
    assert [n for n in range(60) if first[n] != second[n]] == [7]


def test_a_file_modified_just_now_is_not_remembered(corpus, reads):
    path = corpus / "007.txt"
    path.write_text("aaaa")
    first = run(corpus)
    stamp = path.stat().st_mtime_ns
    path.write_text("bbbb")
    os.utime(path, ns=(stamp, stamp))
    assert run(corpus)[7] != first[7]


@pytest.mark.usefixtures("no_racy_window")
def test_the_same_size_and_time_with_other_content_is_seen_by_the_change_time(corpus):
    path = corpus / "007.txt"
    before = path.stat()
    first = run(corpus)
    content = path.read_bytes()
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # the clock has a grain
        path.write_bytes(b"X" + content[1:])
        os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))
    assert run(corpus)[7] != first[7]


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b'{"format": 1}',
        b'{"format": 1, "files": []}',
        b'{"format": 99, "files": {}}',
        b"\xff\x00",
    ],
)
@pytest.mark.usefixtures("no_racy_window")
def test_a_damaged_cache_is_ignored_and_replaced(corpus, user_cache, damage, reads):
    first = run(corpus)
    (cache,) = (user_cache / "hashes").iterdir()
    cache.write_bytes(damage)
    assert run(corpus) == first
    assert len(reads) == 120
    run(corpus)
    assert len(reads) == 120


@pytest.mark.usefixtures("no_racy_window")
def test_damaged_entries_are_ignored(corpus, user_cache, reads):
    first = run(corpus)
    (cache,) = (user_cache / "hashes").iterdir()
    cache.write_bytes(cache.read_bytes().replace(first[3].encode(), b"short"))
    assert run(corpus) == first
    assert len(reads) == 120


@pytest.mark.usefixtures("no_racy_window")
def test_a_cache_that_cannot_be_written_costs_only_time(corpus, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("ABLATE_CACHE", str(tmp_path / "file"))
    assert run(corpus) == run(corpus)


def test_a_file_that_cannot_be_read_is_named(corpus, monkeypatch):
    def refused(path, mode):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("builtins.open", refused)
    with pytest.raises(
        UserError, match=r"000\.txt: cannot read: Permission denied \(check the file's rights\)"
    ):
        hashes._hash(str(corpus / "000.txt"))
