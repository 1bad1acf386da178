import errno
import hashlib
import os
from unittest.mock import Mock

import pytest

from ablate.base.errors import UserError
from ablate.data import sources
from ablate.data.sources import TEXT_SUFFIXES, find_files, stdlib_files


@pytest.fixture
def names(tmp_path, monkeypatch):
    """Return a function that names the files of some paths, after it wrote what is given."""
    monkeypatch.chdir(tmp_path)

    def find(*paths, write=()):
        for name in write:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("x")
        return [file.name for file in find_files(paths, TEXT_SUFFIXES)]

    return find


SHARDS = [f"c4/c4-train.{n:05}-of-01024.json.gz" for n in range(12)]
PARTS = [f"part{n}/{m}.txt" for n in range(8, 11) for m in range(2)]


@pytest.mark.parametrize(
    ("there", "paths", "found"),
    [
        # text alone, and no hidden files
        (["b.txt", "e/a.md", "c.bin", ".git/c.txt", ".h.txt", "d.PY"], ["."], ["b.txt", "d.PY", "e/a.md"]),
        # a named file whatever its suffix, and once
        (["corpus.log", "a.txt"], ["corpus.log", "corpus.log", ".", "a.txt"], ["a.txt", "corpus.log"]),
        # relative to the fixed part
        (["x/1.txt", "y/2.txt", "y/d/3.txt"], ["*/*.txt"], ["x/1.txt", "y/2.txt"]),
        (["x/1.txt", "y/2.txt", "y/d/3.txt"], ["**/*.txt"], ["x/1.txt", "y/2.txt", "y/d/3.txt"]),
        (SHARDS, ["c4/c4-train.{00008..00011}-of-01024.json.gz"], [name[3:] for name in SHARDS[8:]]),
        (PARTS, ["part{8..10}/{0..1}.txt"], [*PARTS[4:], *PARTS[:4]]),
        (PARTS, ["part{9..9}/*.txt"], PARTS[2:4]),
        (["{5..2}.txt"], ["{5..2}.txt"], ["{5..2}.txt"]),
    ],
)  # fmt: skip
def test_paths_name_files(names, there, paths, found):
    assert names(*paths, write=there) == found


def test_every_missing_path_is_reported_at_once_with_the_likely_name(names, tmp_path):
    (tmp_path / "empty").mkdir()
    shards = [*SHARDS[:3], SHARDS[4], *SHARDS[8:]]
    names(".", write=["reviews.txt", *shards, *PARTS, "part8/2.txt"])
    problems = {
        "review.txt": "no such file or folder (did you mean 'reviews.txt'?)",
        "nowhere/a.txt": "no such file or folder (relative paths start at the study file)",
        "*.md": "no file matches (relative paths start at the study file)",
        "empty": "the folder has no file of this source (looked for .txt, ",
        "c4/c4-train.{00002..00013}-of-01024.json.gz": "6 of the 12 shards are missing: "
        + ", ".join(f"c4-train.{n:05}-of-01024.json.gz" for n in (3, 5, 6, 7, 12, 13))
        + " (fetch them, or name a range that is there)",
        "{5..2}.txt": "{5..2} is no range of shards",
    }
    with pytest.raises(UserError) as error:
        names(*problems)
    lines = str(error.value).split("\n")
    for line, (path, problem) in zip(lines, problems.items(), strict=True):
        assert line.startswith(f"{path}: {problem}")
    said = r"\{0\.\.2\}\.txt: 2 of the 9 shards are missing: part9/2\.txt, "
    with pytest.raises(UserError, match=said):
        names("part{8..10}/{0..2}.txt")


def test_a_folder_without_rights_is_named(names, monkeypatch):
    def refuse(place):
        raise PermissionError(errno.EACCES, "Permission denied", place)

    monkeypatch.setattr(os, "scandir", refuse)
    said = r"cannot read the folder: Permission denied \(check its rights\)"
    with pytest.raises(UserError, match=said):
        names(".")


def test_the_stdlib_has_its_modules_and_nothing_of_this_machine(tmp_path, monkeypatch):
    files = {file.name: file for file in stdlib_files()}
    assert {"argparse.py", "asyncio/base_events.py"} <= set(files)
    for name in files:
        assert name.endswith(".py")
        assert not {"site-packages", "test", "tests"} & set(name.split("/"))
        assert "_sysconfigdata" not in name
    assert sum(file.size for file in files.values()) > 5_000_000
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(tmp_path / "lib.zip"))
    said = r"no source files of its standard library \(use data.source: text"
    with pytest.raises(UserError, match=said):
        stdlib_files()


# Hashes of their content


@pytest.fixture
def no_racy_window(monkeypatch):
    """Remember new files too: the change time of a test's file cannot be set back."""
    monkeypatch.setattr(sources, "_RACY_NS", -(1 << 62))


def run(folder):
    return sources.content_hashes(find_files([str(folder)], (".txt",)), "key")


@pytest.fixture
def reads(monkeypatch):
    """Count the files that are hashed."""
    counted = Mock(wraps=sources.hash_file)
    monkeypatch.setattr(sources, "hash_file", counted)
    return counted


@pytest.mark.usefixtures("no_racy_window")
def test_only_a_changed_file_is_read_again(corpus, reads):
    first = run(corpus)
    contents = [path.read_bytes() for path in sorted(corpus.iterdir())]
    assert first == [hashlib.sha256(content).hexdigest() for content in contents]
    (corpus / "007.txt").write_text("other")
    second = run(corpus)
    assert reads.call_count == 61
    assert [n for n in range(60) if first[n] != second[n]] == [7]


def test_a_file_modified_just_now_is_not_remembered(corpus):
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
    "damage", [lambda _: b"", lambda _: b"[]", lambda text: text.replace(b"0", b"1", 1)]
)
@pytest.mark.usefixtures("no_racy_window")
def test_a_cache_that_is_damaged_or_cannot_be_written_costs_only_time(
    corpus, user_cache, damage, reads, monkeypatch
):
    first = run(corpus)
    (cache,) = (user_cache / "hashes").iterdir()
    cache.write_bytes(damage(cache.read_bytes()))
    for _ in range(2):
        assert run(corpus) == first
        assert reads.call_count == 120
    monkeypatch.setenv("ABLATE_CACHE", str(corpus / "000.txt"))
    assert run(corpus) == first
