import errno
import fcntl
import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from ablate.base.errors import UserError
from ablate.base.files import read_record, write_record
from ablate.data import identify, load, open_tokens, prepare, tokenise
from ablate.run.config import DataConfig


@pytest.fixture
def data(tmp_path, write_texts):
    return DataConfig(source="text", paths=[str(write_texts(tmp_path / "corpus"))])


@pytest.fixture
def work(monkeypatch):
    """Return a list with an entry for each time that text was tokenised."""
    done = []
    real = tokenise.prepare_text
    monkeypatch.setattr(tokenise, "prepare_text", lambda *args: done.append(1) or real(*args))
    return done


def listed(cache):
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def test_the_folder_is_named_by_the_digest_complete_and_made_once(data, tmp_path, work):
    files = prepare(data, tmp_path / "a" / "cache")
    digest = identify(data).digest
    assert files.digest == digest
    assert files.folder == tmp_path / "a" / "cache" / digest[:16]
    assert listed(files.folder) == ["meta.json", "train.bin", "validation.bin"]
    assert listed(files.folder.parent) == [digest[:16]]
    assert prepare(data, tmp_path / "a" / "cache") == files
    assert len(work) == 1


def test_equal_digests_have_the_same_bytes_wherever_files_of_one_name_lie(tmp_path, texts):
    made = []
    for name, half in (("one", (texts[:30], texts[30:])), ("two", (texts[30:], texts[:30]))):
        paths = []
        for place, part in zip("ab", half, strict=True):
            paths.append(tmp_path / name / place / "same.jsonl")
            paths[-1].parent.mkdir(parents=True)
            paths[-1].write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
        made.append(prepare(DataConfig(source="jsonl", paths=[*map(str, paths)]), tmp_path / f"cache-{name}"))
    assert made[0].digest == made[1].digest
    assert made[0].train.read_bytes() == made[1].train.read_bytes()


def test_other_content_gets_another_folder(data, tmp_path, work):
    first = prepare(data, tmp_path / "cache")
    (tmp_path / "corpus" / "000.txt").write_text("other")
    assert prepare(data, tmp_path / "cache").folder != first.folder
    assert len(work) == 2


@pytest.mark.parametrize(
    ("name", "damage", "fault"),
    [
        *((name, "a bit", f"{name} was altered") for name in ("train.bin", "validation.bin")),
        ("train.bin", "cut", r"train\.bin has 100 bytes, not \d+"),
        ("meta.json", "cut", r"meta\.json cannot be understood"),
        ("meta.json", "a bit", r"meta\.json cannot be understood"),
        ("meta.json", "format", "has format 1, not 2"),
        *((name, "gone", f"{name}: No such file") for name in ("train.bin", "validation.bin")),
    ],
)
def test_damage_is_found_named_and_mended(data, tmp_path, work, name, damage, fault):
    files = prepare(data, tmp_path / "cache")
    path = files.folder / name
    content = path.read_bytes()
    middle = len(content) // 2
    if damage == "a bit":
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif damage == "cut":
        path.write_bytes(content[:100])
    elif damage == "format":
        write_record(path, read_record(path) | {"format": 1})
    else:
        path.unlink()
    with pytest.raises(UserError, match=f"no usable token files: .*{fault}.*\\(start the study again"):
        load(files.folder)
    said = []
    assert prepare(data, tmp_path / "cache", notice=said.append) == files
    (notice,) = said
    assert notice.endswith("; the tokens are prepared anew.")
    assert len(work) == 2
    assert path.read_bytes() == content
    assert listed(tmp_path / "cache") == [files.folder.name]


def test_tokens_that_everybody_could_have_changed_are_made_anew(data, tmp_path, work):
    files = prepare(data, tmp_path / "cache")
    files.train.chmod(0o666)
    with pytest.raises(UserError, match=f"everybody can write to {files.train}"):
        load(files.folder)
    prepare(data, tmp_path / "cache")
    assert len(work) == 2
    assert files.train.stat().st_mode & 0o002 == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
def test_tokens_of_another_user_where_everybody_can_write_are_refused(files):
    os.chown(files.folder, 65534, 65534)
    load(files.folder)  # a group's storage, or a file server's owners
    files.folder.parent.chmod(0o777)
    with pytest.raises(UserError, match="another user made it, and everybody can write to"):
        load(files.folder)


def test_a_killed_preparation_leaves_nothing_in_the_way(data, tmp_path):
    cache = tmp_path / "cache"
    digest = identify(data).digest[:16]
    program = f"""
import os, sys
from pathlib import Path
from ablate.run.config import DataConfig
from ablate.data import prepare
module = sys.modules["ablate.data.prepare"]
module._publish = lambda *args: os.kill(os.getpid(), 9)
prepare(DataConfig(source="text", paths={data.paths!r}), Path({str(cache)!r}))
"""
    result = subprocess.run([sys.executable, "-c", program], check=False)
    assert result.returncode == -9
    (left,) = listed(cache)
    assert left.startswith(f".{digest}.")
    files = prepare(data, cache)
    assert listed(cache) == [files.folder.name]


def test_what_another_host_works_on_is_not_touched(data, tmp_path):
    cache = tmp_path / "cache"
    digest = identify(data).digest[:16]
    (cache / f".{digest}.not-{socket.gethostname()}.x").mkdir(parents=True)
    prepare(data, cache)
    assert len(listed(cache)) == 2


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
files = prepare(data, Path({str(tmp_path / "cache")!r}), progress=hear)
print(files.folder.name)
"""
    both = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in "12"
    ]
    output = "".join(process.communicate()[0] for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert output.count("worked") == 1
    assert output.count(listed(tmp_path / "cache")[0]) == 2


@pytest.fixture
def no_locks(monkeypatch):
    def refuse(*_args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.usefixtures("no_locks")
def test_without_locks_the_first_rename_wins(data, tmp_path, monkeypatch):
    real = tokenise.prepare_text
    results = {}

    def meanwhile(*args):
        monkeypatch.setattr(tokenise, "prepare_text", real)
        results["other"] = prepare(data, tmp_path / "cache")
        results["inode"] = results["other"].train.stat().st_ino
        return real(*args)

    monkeypatch.setattr(tokenise, "prepare_text", meanwhile)
    files = prepare(data, tmp_path / "cache")
    assert files == results["other"]
    assert files.train.stat().st_ino == results["inode"]
    assert listed(tmp_path / "cache") == [files.folder.name]


def test_a_corpus_that_changes_while_it_is_read_is_refused(data, tmp_path, monkeypatch):
    real = tokenise.prepare_text

    def meddle(*args):
        (tmp_path / "corpus" / "000.txt").write_text("other")
        return real(*args)

    monkeypatch.setattr(tokenise, "prepare_text", meddle)
    with pytest.raises(UserError, match="the corpus changed while it was read"):
        prepare(data, tmp_path / "cache")
    assert listed(tmp_path / "cache") == []


def test_a_cache_that_cannot_be_written_is_named(data, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"cannot write the token cache: .*\(check free space and rights"):
        prepare(data, tmp_path / "file" / "cache")

    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tokenise, "prepare_text", full)
    with pytest.raises(UserError, match=r"cannot write the token cache: No space left on device"):
        prepare(data, tmp_path / "cache")


def test_progress_rises_to_one_and_names_the_stages(data, tmp_path):
    seen = []
    bpe = DataConfig(source="text", paths=data.paths, tokenizer="bpe", vocab_size=300)
    prepare(bpe, tmp_path / "cache", progress=lambda *args: seen.append(args))
    fractions = [fraction for fraction, _ in seen]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert list(dict.fromkeys(what for _, what in seen)) == [
        "reading text",
        "holding out validation text",
        "learning the BPE",
        "tokenising",
        "tokens are ready",
    ]


@pytest.fixture
def files(tmp_path, write_texts):
    data = DataConfig(source="text", paths=[str(write_texts(tmp_path / "corpus"))])
    return prepare(data, tmp_path / "cache")


def test_loaded_files_are_the_prepared_ones(files):
    assert load(files.folder) == files
    train, validation = open_tokens(files)
    assert (len(train), len(validation)) == (files.train_tokens, files.validation_tokens)
    assert train.dtype == np.dtype("<u2")
    with pytest.raises(ValueError, match="read-only"):
        train[0] = 1


def test_a_folder_may_move(files, tmp_path):
    files.folder.rename(tmp_path / "moved")
    moved = load(tmp_path / "moved")
    assert moved.train == tmp_path / "moved" / "train.bin"
