from dataclasses import replace

import numpy as np
import pytest

from ablate.base.errors import UserError
from ablate.data import load, open_tokens, prepare, pretokenised
from ablate.run.config import DataConfig


@pytest.fixture
def write(tmp_path):
    def write_tokens(name, values, dtype="<u2"):
        np.asarray(values, dtype=dtype).tofile(tmp_path / name)
        return str(tmp_path / name)

    return write_tokens


def config(*paths, **fields):
    return DataConfig(source="tokens", paths=list(paths), **{"vocab_size": 1000, **fields})


def test_a_single_file_is_used_in_place_and_its_end_held_out(write, tmp_path):
    values = np.arange(10_000) % 1000
    files = prepare(config(write("t.bin", values)), tmp_path / "cache")
    train, validation = open_tokens(files)
    assert files.train == tmp_path / "t.bin"
    assert not (files.folder / "train.bin").exists()
    assert (len(train), len(validation)) == (9000, 1000)
    assert np.concatenate([train, validation]).tolist() == values.tolist()
    assert files.validation_bytes_per_token is None


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_several_files_are_joined(write, tmp_path, dtype, monkeypatch):
    monkeypatch.setattr(pretokenised, "_CHUNK_TOKENS", 100)
    values = np.random.default_rng(0).integers(0, 1000, 3000)
    paths = [write(f"{n}.bin", values[n * 1000 : (n + 1) * 1000], dtype) for n in range(3)]
    files = prepare(config(*paths, token_dtype=dtype), tmp_path / "cache")
    train, validation = open_tokens(files)
    assert train.dtype == np.dtype(dtype)
    assert (len(train), len(validation)) == (2700, 300)
    assert np.concatenate([train, validation]).tolist() == values.tolist()


def test_validation_files_are_the_validation_set(write, tmp_path):
    data = config(write("t.bin", [1] * 500), validation_paths=[write("v.bin", [2] * 70)])
    train, validation = open_tokens(prepare(data, tmp_path / "cache"))
    assert train.tolist() == [1] * 500
    assert validation.tolist() == [2] * 70


def test_max_bytes_takes_the_beginning(write, tmp_path):
    data = config(write("t.bin", range(1000)), max_bytes=400)
    train, validation = open_tokens(prepare(data, tmp_path / "cache"))
    assert train.tolist() == list(range(180))
    assert validation.tolist() == list(range(180, 200))


@pytest.mark.parametrize("position", [0, 250, 999])
def test_an_id_outside_the_vocabulary_is_found_anywhere(write, tmp_path, position, monkeypatch):
    monkeypatch.setattr(pretokenised, "_CHUNK_TOKENS", 100)
    values = np.zeros(1000, dtype=int)
    values[position] = 1000
    path = write("t.bin", values)
    with pytest.raises(UserError) as error:
        prepare(config(path), tmp_path / "cache")
    assert str(error.value) == (
        f"{path}: token {position} has id 1000, but data.vocab_size is 1000 "
        "(check vocab_size and token_dtype)"
    )


def test_a_numpy_file_is_refused(tmp_path):
    np.save(tmp_path / "t.npy", np.zeros(1000, dtype="<u2"))
    with pytest.raises(UserError, match=r"t\.npy: is a NumPy file with a header \(write the bare numbers"):
        prepare(config(str(tmp_path / "t.npy"), vocab_size=65536), tmp_path / "cache")


@pytest.mark.parametrize("count", [0, 1, 9])
def test_too_few_tokens(write, tmp_path, count):
    with pytest.raises(UserError, match=rf"t\.bin: too few tokens for a validation set: {count}"):
        prepare(config(write("t.bin", [1] * count)), tmp_path / "cache")


def test_an_empty_validation_file(write, tmp_path):
    data = config(write("t.bin", [1] * 500), validation_paths=[write("v.bin", [])])
    with pytest.raises(UserError, match=r"v\.bin: no tokens"):
        prepare(data, tmp_path / "cache")


def test_a_moved_file_is_found_again_and_a_changed_one_refused(write, tmp_path):
    path = write("t.bin", range(1000))
    first = prepare(config(path), tmp_path / "cache")
    (tmp_path / "t.bin").rename(tmp_path / "moved.bin")
    with pytest.raises(UserError, match="no usable token files"):
        load(first.folder)
    moved = config(str(tmp_path / "moved.bin"))
    # The name is part of the digest: copying back under the old name elsewhere is the same corpus.
    assert prepare(moved, tmp_path / "cache").digest != first.digest
    (tmp_path / "other").mkdir()
    (tmp_path / "moved.bin").rename(tmp_path / "other" / "t.bin")
    second = prepare(config(str(tmp_path / "other" / "t.bin")), tmp_path / "cache")
    assert second.folder == first.folder
    assert second.train == tmp_path / "other" / "t.bin"
    write("other/t.bin", [*range(999), 5])
    with pytest.raises(UserError, match=r"t\.bin changed since the tokens were prepared"):
        load(second.folder)


def test_progress_reaches_the_end(write, tmp_path, monkeypatch):
    monkeypatch.setattr(pretokenised, "_CHUNK_TOKENS", 100)
    seen = []
    data = replace(config(write("t.bin", range(1000))), validation_paths=[])
    prepare(data, tmp_path / "cache", progress=lambda fraction, _what: seen.append(fraction))
    assert len(seen) > 9
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
