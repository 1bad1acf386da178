"""Preparation in parts: the same files for any number of workers, and after any interruption."""

import gzip
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ablate.base.errors import UserError
from ablate.data import parts, prepare, tokenise
from ablate.data.cache import record_of
from ablate.run.config import DataConfig
from tests.exhaustive import rest_exhaustive


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(parts, "PART_BYTES", 1)


@pytest.fixture
def shards(tmp_path, write_json, texts):
    """Return five shards, with copies and near copies across them, and two of validation text."""
    folder = tmp_path / "corpus"
    near = [f"Posted again by {n}\n{text}" for n, text in enumerate(texts)]
    documents = [*texts, "", *texts[:20], *near, " \n"]
    for n in range(5):
        write_json(folder / f"train.{n:05}-of-00005.json.gz", documents[n::5])
    write_json(folder / "validation.00000-of-00002.json.gz", texts[40:44])
    write_json(folder / "validation.00001-of-00002.json.gz", texts[44:46])
    return folder


def configs(folder):
    train = [str(folder / "train.*.json.gz")]
    held_out = DataConfig(source="jsonl", paths=train)
    own = replace(held_out, validation_paths=[str(folder / "validation.*.json.gz")])
    bpe = {"tokenizer": "bpe", "vocab_size": 320}
    return {
        "held out": held_out,
        "own": own,
        "bpe": replace(own, **bpe),
        "bpe, held out": replace(held_out, **bpe),
        "cut": replace(held_out, max_bytes=60_000),
        "cut in the first": replace(own, max_bytes=5_000),
        "text": DataConfig(source="text", paths=train, validation_paths=own.validation_paths),
    }


def contents(files):
    return {path.name: path.read_bytes() for path in files.folder.iterdir() if path.name != "meta.json"}


@pytest.mark.parametrize("name", rest_exhaustive(configs(Path()), ("held out", "bpe", "text").__contains__))
def test_the_same_bytes_on_any_number_of_workers(shards, tmp_path, name, monkeypatch):
    data = configs(shards)[name]
    made = {n: prepare(data, tmp_path / f"cache-{n}", num_workers=n) for n in (1, 2, 3)}
    monkeypatch.setattr(parts, "PART_BYTES", 1 << 30)
    made["whole"] = prepare(data, tmp_path / "cache-whole")
    first = contents(made[1])
    assert set(first) >= {"train.bin", "validation.bin"}
    for n, files in made.items():
        assert contents(files) == first
        meta = json.loads((files.folder / "meta.json").read_text())
        assert meta == json.loads((made[1].folder / "meta.json").read_text())
        assert sorted(
            path.name for path in (tmp_path / f"cache-{n}").iterdir() if "lock" not in path.name
        ) == [files.folder.name]


def test_real_shards_on_two_workers(shared_data, tmp_path):
    data = DataConfig(
        source="jsonl",
        paths=[str(shared_data / "text" / "reviews-train.*.json.gz")],
        validation_paths=[str(shared_data / "text" / "reviews-validation.*.json.gz")],
    )
    one, two = (prepare(data, tmp_path / str(n), num_workers=n) for n in (1, 2))
    assert contents(one) == contents(two)
    assert json.loads((one.folder / "meta.json").read_text())["near_copies_left_out"] == 2


def kept_in(cache):
    (folder,) = cache.glob(".*.parts")
    return folder


@pytest.fixture
def encoded(monkeypatch):
    """Return a list of the numbers of parts whose tokens are made from here on, in this process."""
    made = []
    real_path, real_keep = tokenise.tokens_path, parts.keep
    numbers = {}

    def tokens_path(number, *arguments):
        path = real_path(number, *arguments)
        numbers[path] = number
        return path

    def keep(path, write):
        if path in numbers:
            made.append(numbers[path])
        return real_keep(path, write)

    monkeypatch.setattr(parts, "keep", keep)
    monkeypatch.setattr(tokenise, "tokens_path", tokens_path)
    return made


def prepare_until(count, data, cache):
    """Prepare, but stop as by Ctrl-C when so many parts are appended and the next one is made."""
    real, seen = tokenise.shutil.copyfileobj, []

    def copy(*arguments):
        if len(seen) == count:
            raise KeyboardInterrupt
        seen.append(1)
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenise.shutil, "copyfileobj", copy)
        with pytest.raises(KeyboardInterrupt):
            prepare(data, cache, num_workers=1)


@pytest.mark.parametrize("count", [0, 2, 4])
def test_an_interrupted_preparation_goes_on_where_it_was(shards, tmp_path, encoded, count):
    data = configs(shards)["bpe"]
    whole = contents(prepare(data, tmp_path / "whole", num_workers=1))
    encoded.clear()
    prepare_until(count, data, tmp_path / "cache")
    assert encoded == list(range(count + 1))
    encoded.clear()
    files = prepare(data, tmp_path / "cache", num_workers=1)
    assert encoded == list(range(count + 1, 5))
    assert contents(files) == whole
    assert not list((tmp_path / "cache").glob(".*.parts"))


def test_a_part_that_was_damaged_meanwhile_is_made_again(shards, tmp_path, encoded):
    data = configs(shards)["own"]
    whole = contents(prepare(data, tmp_path / "whole", num_workers=1))
    prepare_until(3, data, tmp_path / "cache")
    folder = kept_in(tmp_path / "cache")
    records = {path: record_of(path.with_suffix("")) for path in folder.glob("*.tokens.json")}
    assert len(records) == 4
    growing = folder / "train.bin"
    content = bytearray(growing.read_bytes())
    content[-1] ^= 1  # in the third part
    growing.write_bytes(content + b"half of a part")
    encoded.clear()
    assert contents(prepare(data, tmp_path / "cache", num_workers=1)) == whole
    assert encoded == [2, 4]  # the fourth lay there, whole


def test_a_killed_preparation_goes_on_and_keeps_what_was_done(shards, tmp_path):
    data = configs(shards)["bpe"]
    whole = contents(prepare(data, tmp_path / "whole", num_workers=2))
    program = f"""
import os, shutil
from pathlib import Path
from ablate.run.config import DataConfig
from ablate.data import parts, prepare, tokenise
parts.PART_BYTES = 1
real, seen = shutil.copyfileobj, []
def copy(*arguments):
    if len(seen) == 2:
        os.kill(os.getpid(), 9)
    seen.append(1)
    return real(*arguments)
tokenise.shutil.copyfileobj = copy
prepare(DataConfig(**{vars(data)!r}), Path({str(tmp_path / "cache")!r}), num_workers=2)
"""
    killed = subprocess.run([sys.executable, "-c", program], check=False)
    assert killed.returncode == -9
    growing = kept_in(tmp_path / "cache") / "train.bin"
    assert 0 < growing.stat().st_size < len(whole["train.bin"])
    assert contents(prepare(data, tmp_path / "cache", num_workers=2)) == whole


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda blob: blob[: len(blob) // 2], r"train\.00003-of-00005\.json\.gz.*gzip data is damaged"),
        (
            lambda blob: gzip.compress(gzip.decompress(blob).replace(b"{", b"", 1), mtime=0),
            r"train\.00003-of-00005\.json\.gz:1: is not a JSON object",
        ),
    ],
)
def test_a_damaged_shard_is_one_line_and_the_others_are_kept(
    shards, tmp_path, number, damage, message, monkeypatch
):
    data = configs(shards)["own"]
    bad = shards / "train.00003-of-00005.json.gz"
    sound = bad.read_bytes()
    whole = contents(prepare(data, tmp_path / "whole", num_workers=1))
    bad.write_bytes(damage(sound))
    with pytest.raises(UserError, match=message) as error:
        prepare(data, tmp_path / "cache", num_workers=number)
    assert len(error.value.problems) == 1
    # A worker that is ended between a file and its record leaves a file that counts as missing.
    kept = [path for path in kept_in(tmp_path / "cache").glob("*.documents") if record_of(path)]
    assert len(kept) >= 3
    stamps = {path: path.stat().st_mtime_ns for path in kept}
    bad.write_bytes(sound)
    real = tokenise.shutil.rmtree
    seen = {}

    def look(path, **options):
        seen.update({entry: entry.stat().st_mtime_ns for entry in kept if entry.exists()})
        return real(path, **options)

    monkeypatch.setattr(tokenise.shutil, "rmtree", look)
    assert contents(prepare(data, tmp_path / "cache", num_workers=number)) == whole
    assert seen == stamps  # used as they were


def test_a_damaged_shard_behind_the_limit_is_not_looked_at(shards, tmp_path):
    data = configs(shards)["cut in the first"]
    for n in (1, 2, 3, 4):
        (shards / f"train.{n:05}-of-00005.json.gz").write_bytes(b"no gzip")
    one, three = (prepare(data, tmp_path / str(n), num_workers=n) for n in (1, 3))
    assert contents(one) == contents(three)
    with pytest.raises(UserError, match=r"train\.00001-of-00005\.json\.gz: gzip data is damaged"):
        prepare(replace(data, max_bytes=50_000), tmp_path / "3", num_workers=3)


def test_a_shard_that_changes_between_two_readings_is_refused(shards, tmp_path, monkeypatch):
    real = tokenise._write_side

    def meddle(*arguments):
        path = shards / "train.00001-of-00005.json.gz"
        path.write_bytes(path.read_bytes())
        os.utime(path, (1, 1))
        return real(*arguments)

    monkeypatch.setattr(tokenise, "_write_side", meddle)
    with pytest.raises(UserError, match=r"train\.00001.*: the corpus changed while it was read \(run again"):
        prepare(configs(shards)["own"], tmp_path / "cache", num_workers=2)


@pytest.mark.exhaustive
def test_progress_is_heard_several_times_a_second(shared_data, tmp_path):
    heard = []
    data = DataConfig(
        source="jsonl",
        paths=[str(shared_data / "text" / "reviews-train.*.json.gz")],
        tokenizer="bpe",
        vocab_size=400,
    )
    prepare(data, tmp_path / "c", num_workers=2, progress=lambda *now: heard.append((time.monotonic(), *now)))
    fractions = [fraction for _, fraction, _ in heard]
    assert fractions == sorted(fractions)
    tokenising = [at for at, _, what in heard if what == "tokenising"]
    assert len(tokenising) / (tokenising[-1] - tokenising[0]) > 3
