import errno
import fcntl
import os
import subprocess
import sys
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest

from ablate.base.errors import UserError
from ablate.base.files import read_record, write_record
from ablate.data import identify, load, open_tokens, prepare, tokenise
from ablate.run.config import DataConfig


@pytest.fixture
def data(corpus):
    return DataConfig(source="text", paths=[str(corpus)])


@pytest.fixture
def work(monkeypatch):
    """Count how often text is tokenised; a side effect comes before it."""
    counted = Mock(wraps=tokenise.prepare_text)
    monkeypatch.setattr(tokenise, "prepare_text", counted)
    return counted


@pytest.fixture
def files(data, tmp_path):
    return prepare(data, tmp_path / "cache")


def listed(cache):
    return sorted(
        path.name for path in cache.iterdir() if not path.name.endswith(".lock")
    )


def test_the_folder_is_named_by_the_digest_complete_made_once_and_may_move(
    data, tmp_path, work
):
    files = prepare(data, tmp_path / "a" / "cache")
    digest = identify(data).digest
    assert files.digest == digest
    assert files.folder == tmp_path / "a" / "cache" / digest[:16]
    assert listed(files.folder) == ["meta.json", "train.bin", "validation.bin"]
    assert listed(files.folder.parent) == [digest[:16]]
    assert prepare(data, tmp_path / "a" / "cache") == load(files.folder) == files
    train, validation = open_tokens(files)
    assert len(train) == files.train_tokens
    assert len(validation) == files.validation_tokens
    assert train.dtype == np.dtype("<u2")
    with pytest.raises(ValueError, match="read-only"):
        train[0] = 1
    (tmp_path / "corpus" / "000.txt").write_text("other")
    assert prepare(data, tmp_path / "a" / "cache").folder != files.folder
    assert work.call_count == 2
    moved = files.folder.rename(tmp_path / "moved")
    assert load(moved).train == moved / "train.bin"


@pytest.mark.parametrize(
    ("name", "damage", "fault"),
    [
        ("train.bin", "a bit", "train.bin was altered"),
        ("meta.json", "a bit", r"meta\.json cannot be understood"),
        ("meta.json", "format", "has format 1, not 2"),
        ("validation.bin", "gone", "validation.bin: No such file"),
        ("train.bin", "open", r"everybody can write to .*train\.bin"),
    ],
)
def test_damage_is_found_named_and_mended(
    data, files, tmp_path, work, name, damage, fault
):
    path = files.folder / name
    content = path.read_bytes()
    middle = len(content) // 2
    if damage == "a bit":
        flipped = bytes([content[middle] ^ 1])
        path.write_bytes(content[:middle] + flipped + content[middle + 1 :])
    elif damage == "format":
        write_record(path, read_record(path) | {"format": 1})
    elif damage == "open":
        path.chmod(0o666)
    else:
        path.unlink()
    said = f"no usable token files: .*{fault}.*\\(start the study again"
    with pytest.raises(UserError, match=said):
        load(files.folder)
    notices = []
    assert prepare(data, tmp_path / "cache", notice=notices.append) == files
    (notice,) = notices
    assert notice.endswith("; the tokens are prepared anew.")
    assert work.call_count == 1
    assert path.read_bytes() == content
    assert path.stat().st_mode & 0o002 == 0
    assert listed(tmp_path / "cache") == [files.folder.name]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
def test_tokens_of_another_user_where_everybody_can_write_are_refused(files):
    os.chown(files.folder, 65534, 65534)
    load(files.folder)  # a group's storage, or a file server's owners
    files.folder.parent.chmod(0o777)
    said = "another user made it, and everybody can write to"
    with pytest.raises(UserError, match=said):
        load(files.folder)


def test_two_processes_at_once_do_the_work_once(data, tmp_path):
    program = f"""
import time
from pathlib import Path
from ablate.run.config import DataConfig
from ablate.data import prepare, tokenise
waiting = Path({str(tmp_path / "waiting")!r})
real = tokenise.prepare_text
def slow(*args):
    print("worked")
    while not waiting.exists():  # until the other one says so
        time.sleep(0.01)
    return real(*args)
tokenise.prepare_text = slow
def hear(_fraction, what):
    if what == "another process prepares these tokens":
        waiting.touch()
data = DataConfig(source="text", paths={data.paths!r})
print(prepare(data, Path({str(tmp_path / "cache")!r}), progress=hear).folder.name)
"""
    command = [sys.executable, "-c", program]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in "12"]
    output = "".join(process.communicate()[0] for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert output.count("worked") == 1
    assert output.count(listed(tmp_path / "cache")[0]) == 2


def test_without_locks_the_first_rename_wins(data, tmp_path, monkeypatch, work):
    refuse = Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    results = []

    def another(*_):
        if work.call_count == 1:
            results.append(prepare(data, tmp_path / "cache"))
            results.append(results[0].train.stat().st_ino)
        return DEFAULT

    monkeypatch.setattr(fcntl, "flock", refuse)
    work.side_effect = another
    files = prepare(data, tmp_path / "cache")
    assert [files, files.train.stat().st_ino] == results
    assert listed(tmp_path / "cache") == [files.folder.name]


def test_a_corpus_that_changes_while_it_is_read_is_refused(data, tmp_path, work):
    def another(*_):
        (tmp_path / "corpus" / "000.txt").write_text("other")
        return DEFAULT

    work.side_effect = another
    with pytest.raises(UserError, match="the corpus changed while it was read"):
        prepare(data, tmp_path / "cache")
    assert listed(tmp_path / "cache") == []


def test_a_cache_that_cannot_be_written_is_named(data, tmp_path, work):
    (tmp_path / "file").write_text("x")
    said = r"cannot write the token cache: .*\(check free space and rights"
    with pytest.raises(UserError, match=said):
        prepare(data, tmp_path / "file" / "cache")
    work.side_effect = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(UserError, match="token cache: No space left on device"):
        prepare(data, tmp_path / "cache")
