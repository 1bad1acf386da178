import json

import numpy as np
import pytest

from ablate.base.errors import UserError
from ablate.data import load, open_tokens, prepare
from ablate.run.config import DataConfig


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


@pytest.mark.parametrize("name", ["train.bin", "validation.bin", "meta.json"])
def test_a_missing_file_is_named(files, name):
    (files.folder / name).unlink()
    with pytest.raises(
        UserError, match=rf"no usable token files: .*{name}: No such file.*\(start the study again"
    ):
        load(files.folder)


def test_a_cut_file_is_named(files):
    with files.train.open("r+b") as file:
        file.truncate(100)
    with pytest.raises(UserError, match=r"train\.bin has 100 bytes, not \d+"):
        load(files.folder)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 1}'])
def test_a_damaged_description_is_refused(files, content):
    (files.folder / "meta.json").write_text(content)
    with pytest.raises(UserError, match=r"meta\.json cannot be understood"):
        load(files.folder)


def test_another_format_is_refused(files):
    path = files.folder / "meta.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    with pytest.raises(UserError, match="has format 2, not 1"):
        load(files.folder)
