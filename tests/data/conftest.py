"""A small corpus, and an own user cache for every test."""

import gzip
import json
import random

import numpy as np
import pytest

from ablate.data import open_tokens


def documents_of(files):
    """Return the documents of both sides, from the tokens of a bytes tokeniser."""
    return [
        bytes(tokens.astype(np.uint8)).decode().split("\0")[:-1]
        for tokens in open_tokens(files)
    ]


@pytest.fixture(autouse=True)
def user_cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("user-cache")
    monkeypatch.setenv("ABLATE_CACHE", str(folder))
    return folder


def _sentences(seed, count):
    rng = random.Random(seed)
    words = "a small model reads each window once and then never forgets what it has not seen"
    sentences = [" ".join(rng.choices(words.split(), k=12)) for _ in range(count)]
    return [f"{sentence} {seed}-{n}." for n, sentence in enumerate(sentences)]


@pytest.fixture
def texts():
    """Return 60 different documents of about 1 KB."""
    return ["\n".join(_sentences(seed, 14)) for seed in range(60)]


@pytest.fixture
def write_texts(texts):
    """Return a function that writes the documents as text files into a folder."""

    def write(folder, documents=texts):
        folder.mkdir(parents=True, exist_ok=True)
        for n, text in enumerate(documents):
            (folder / f"{n:03}.txt").write_text(text)
        return folder

    return write


@pytest.fixture
def corpus(tmp_path, write_texts):
    """A folder of these text files."""
    return write_texts(tmp_path / "corpus")


@pytest.fixture
def write_json():
    """Return a function that writes documents as JSON lines, compressed if the name says so."""

    def write(path, documents, field="text"):
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "wt") as file:
            for text in documents:
                print(json.dumps({field: text, "url": "x"}), file=file)
        return path

    return write
