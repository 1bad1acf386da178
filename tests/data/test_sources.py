import hashlib
import os

import pytest

from ablate.base.errors import UserError
from ablate.data import sources
from ablate.data.sources import TEXT_SUFFIXES, find_files, stdlib_files


def names(paths):
    return [file.name for file in find_files([str(path) for path in paths], TEXT_SUFFIXES)]


def test_a_folder_is_searched_for_text_only_and_without_hidden_files(tmp_path):
    for name in ("b.txt", "deep/er/a.md", "c.bin", ".git/config.txt", ".hidden.txt", "d.PY"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert names([tmp_path]) == ["b.txt", "d.PY", "deep/er/a.md"]


def test_a_named_file_is_taken_whatever_its_suffix_and_only_once(tmp_path):
    (tmp_path / "corpus.log").write_text("x")
    (tmp_path / "a.txt").write_text("x")
    assert names([tmp_path / "corpus.log", tmp_path / "corpus.log", tmp_path, tmp_path / "a.txt"]) == [
        "a.txt",
        "corpus.log",
    ]


def test_glob_names_are_relative_to_its_fixed_part(tmp_path):
    for name in ("x/one.txt", "y/two.txt", "y/deep/three.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert names([tmp_path / "*" / "*.txt"]) == ["x/one.txt", "y/two.txt"]
    assert names([tmp_path / "**" / "*.txt"]) == ["x/one.txt", "y/deep/three.txt", "y/two.txt"]


def test_every_missing_path_is_reported_at_once_with_the_likely_name(tmp_path):
    (tmp_path / "reviews.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    paths = [tmp_path / "review.txt", tmp_path / "nowhere" / "a.txt", tmp_path / "*.md", tmp_path / "empty"]
    with pytest.raises(UserError) as error:
        names(paths)
    lines = str(error.value).split("\n")
    assert lines[0] == f"{paths[0]}: no such file or folder (did you mean 'reviews.txt'?)"
    assert lines[1] == f"{paths[1]}: no such file or folder (relative paths start at the study file)"
    assert lines[2].startswith(f"{paths[2]}: no file matches")
    assert lines[3].startswith(f"{paths[3]}: the folder has no file of this source (looked for .txt")
    assert len(lines) == 4


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_without_rights_is_named(tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0)
    with pytest.raises(
        UserError, match=r"locked: cannot read the folder: Permission denied \(check its rights\)"
    ):
        names([tmp_path])


def test_the_stdlib_has_its_modules_and_nothing_of_this_machine():
    files = {file.name: file for file in stdlib_files()}
    assert {"argparse.py", "asyncio/base_events.py"} <= set(files)
    for name in files:
        assert name.endswith(".py")
        assert not {"site-packages", "dist-packages", "test", "tests", "idle_test"} & set(name.split("/"))
        assert "_sysconfigdata" not in name
    assert sum(file.size for file in files.values()) > 5_000_000


def test_a_python_without_sources_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(tmp_path / "lib.zip"))
    with pytest.raises(UserError, match=r"no source files of its standard library \(use data.source: text"):
        stdlib_files()


@pytest.fixture
def shards(tmp_path):
    """Return the folder of 12 shards named as C4's."""
    folder = tmp_path / "c4"
    folder.mkdir()
    for n in range(12):
        (folder / f"c4-train.{n:05}-of-01024.json.gz").write_text("x")
    return folder


def test_a_range_names_shards_by_index(shards):
    found = names([shards / "c4-train.{00008..00011}-of-01024.json.gz"])
    assert found == [f"c4-train.{n:05}-of-01024.json.gz" for n in (8, 9, 10, 11)]
    assert found == names([shards / "c4-train.0000[89]-*", shards / "c4-train.0001*"])
    assert len(names([shards / "c4-train.0000{0..9}*"])) == 10
    assert names([shards / "*{00007..00007}*"]) == ["c4-train.00007-of-01024.json.gz"]


def test_the_missing_shards_of_a_range_are_counted_and_named(shards):
    for n in (3, 5, 6, 7):
        (shards / f"c4-train.{n:05}-of-01024.json.gz").unlink()
    path = shards / "c4-train.{00002..00013}-of-01024.json.gz"
    with pytest.raises(UserError) as error:
        names([path])
    assert str(error.value) == (
        f"{path}: 6 of the 12 shards are missing: 00003, 00005, 00006, 00007, 00012, 00013 "
        "(fetch them, or name a range that is there)"
    )


def test_two_ranges_and_a_range_that_is_none(tmp_path):
    for n in range(8, 11):
        (tmp_path / f"part{n}").mkdir()
        for m in range(2):
            (tmp_path / f"part{n}" / f"{m}.txt").write_text("x")
    assert names([tmp_path / "part{8..10}" / "{0..1}.txt"]) == [
        f"part{n}/{m}.txt" for n in (10, 8, 9) for m in (0, 1)
    ]
    (tmp_path / "part8" / "2.txt").write_text("x")
    with pytest.raises(UserError, match=r"part9/\{0\.\.2\}\.txt: 1 of the 3 shards are missing: 2"):
        names([tmp_path / "part{8..10}" / "{0..2}.txt"])
    with pytest.raises(UserError, match=r"\{5\.\.2\} is no range of shards"):
        names([tmp_path / "{5..2}.txt"])
    (tmp_path / "{5..2}.txt").write_text("x")
    assert names([tmp_path / "{5..2}.txt"]) == ["{5..2}.txt"]


@pytest.fixture
def corpus(tmp_path, write_texts, age):
    folder = write_texts(tmp_path / "corpus")
    age(folder)
    return folder


@pytest.fixture
def no_racy_window(monkeypatch):
    """Remember new files too: the change time of a test's file cannot be set back."""
    monkeypatch.setattr(sources, "_RACY_NS", -(1 << 62))


def run(folder):
    return sources.content_hashes(find_files([str(folder)], (".txt",)), "key")


@pytest.fixture
def reads(monkeypatch):
    """Return the list of paths that were hashed."""
    seen = []
    real = sources.hash_file
    monkeypatch.setattr(sources, "hash_file", lambda path: seen.append(path) or real(path))
    return seen


def test_hashes_are_of_the_content(corpus):
    expected = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(corpus.iterdir())]
    assert run(corpus) == expected


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


@pytest.mark.parametrize("damage", [lambda _: b"", lambda _: b"[]", lambda text: text.replace(b"0", b"1", 1)])
@pytest.mark.usefixtures("no_racy_window")
def test_a_damaged_cache_is_ignored_and_replaced(corpus, user_cache, damage, reads):
    first = run(corpus)
    (cache,) = (user_cache / "hashes").iterdir()
    cache.write_bytes(damage(cache.read_bytes()))
    for _ in range(2):
        assert run(corpus) == first
        assert len(reads) == 120


@pytest.mark.usefixtures("no_racy_window")
def test_a_cache_that_cannot_be_written_costs_only_time(corpus, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("ABLATE_CACHE", str(tmp_path / "file"))
    assert run(corpus) == run(corpus)
