import numpy as np
import pytest

from ablate.base.errors import UserError
from ablate.data import load, open_tokens, prepare, tokenise
from ablate.run.config import DataConfig


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Return a function that writes and prepares files of tokens; it returns both sides and the files."""
    monkeypatch.setattr(tokenise, "_CHUNK_TOKENS", 100)

    def make(*parts, own=None, **fields):
        dtype = np.dtype(fields.get("token_dtype", "uint16")).newbyteorder("<")

        def write(name, values):
            np.asarray(values, dtype=dtype).tofile(tmp_path / name)
            return str(tmp_path / name)

        paths = {"paths": [write(f"{n}.bin", part) for n, part in enumerate(parts)]}
        if own is not None:
            paths["validation_paths"] = [write("v.bin", own)]
        data = DataConfig(source="tokens", **{"vocab_size": 1000, **paths, **fields})
        files = prepare(data, tmp_path / "cache")
        return *(tokens.tolist() for tokens in open_tokens(files)), files

    return make


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("parts", [1, 3])
def test_files_are_joined_or_used_in_place_and_the_end_is_held_out(
    made, tmp_path, dtype, parts
):
    values = np.random.default_rng(0).integers(0, 1000, 3000)
    train, validation, files = made(*np.split(values, parts), token_dtype=dtype)
    assert (len(train), len(validation), files.dtype) == (2700, 300, dtype)
    assert train + validation == values.tolist()
    assert (files.train == tmp_path / "0.bin") == (parts == 1)
    assert (files.folder / "train.bin").exists() == (parts == 3)
    assert files.validation_bytes_per_token is None


def test_validation_files_are_the_validation_set_and_max_bytes_takes_the_beginning(
    made,
):
    assert made([1] * 500, own=[2] * 70)[:2] == ([1] * 500, [2] * 70)
    assert made(range(1000), max_bytes=400)[:2] == ([*range(180)], [*range(180, 200)])


@pytest.mark.parametrize("position", [0, 250, 999])
def test_an_id_outside_the_vocabulary_is_found_anywhere(made, tmp_path, position):
    with pytest.raises(UserError) as error:
        made([1000 * (index == position) for index in range(1000)])
    assert str(error.value) == (
        f"{tmp_path}/0.bin: token {position} has id 1000, but vocab_size is 1000 "
        "(check vocab_size and token_dtype)"
    )


def test_what_holds_no_tokens_is_refused(made, tmp_path):
    for count in (0, 1, 9):
        said = rf"0\.bin: too few tokens for a validation set: {count}"
        with pytest.raises(UserError, match=said):
            made([1] * count)
    with pytest.raises(UserError, match=r"v\.bin: no tokens"):
        made([1] * 500, own=[])
    np.save(tmp_path / "t.npy", np.zeros(1000, dtype="<u2"))
    said = r"t\.npy: is a NumPy file with a header \(write the bare numbers"
    with pytest.raises(UserError, match=said):
        made(paths=[str(tmp_path / "t.npy")], vocab_size=65536)


def test_a_moved_file_is_found_again_and_a_changed_one_refused(made, tmp_path):
    first = made(range(1000))[2]
    path = tmp_path / "other" / "0.bin"
    path.parent.mkdir()
    first.train.rename(path)
    with pytest.raises(UserError, match="no usable token files"):
        load(first.folder)
    second = made(paths=[str(path)])[2]
    assert (second.folder, second.train) == (first.folder, path)
    path.write_bytes(path.read_bytes()[:-2] + b"\5\0")
    said = r"0\.bin changed since the tokens were prepared"
    with pytest.raises(UserError, match=said):
        load(second.folder)
