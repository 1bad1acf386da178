"""The metrics file of an attempt."""

import errno
import json
import os

import pytest

from ablate.base.files import hash_of
from ablate.store.metrics import MetricsWriter


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_attempt_keeps_the_rows_it_is_told_and_knows_its_bytes(path):
    path.write_bytes(b'{"n":0}\n{"n":1}\n{"n"')
    with MetricsWriter(path, keep_bytes=8) as writer:
        assert rows(path) == [{"n": 0}]
        for n in (7, 8):
            writer.append({"n": n})
            assert rows(path)[-1] == {"n": n}  # there at once, for those who look on
        with pytest.raises(ValueError, match="not JSON compliant"):
            writer.append({"loss": float("nan")})
        count, digest = writer.sync()
    assert rows(path) == [{"n": 0}, {"n": 7}, {"n": 8}]
    assert (count, digest) == (path.stat().st_size, hash_of(path.read_bytes()))


def test_a_worker_that_was_given_up_for_dead_writes_to_nobody(path):
    with MetricsWriter(path) as dead:
        dead.append({"n": 0})
        with MetricsWriter(path, keep_bytes=dead.bytes) as successor:
            dead.append({"n": "late"})
            successor.append({"n": 1})
            dead.append({"n": "later"})
    assert rows(path) == [{"n": 0}, {"n": 1}]


@pytest.mark.parametrize("part", [0, 3])
def test_a_row_that_does_not_fit_is_taken_back_whole(path, monkeypatch, part):
    real = os.write
    room = [part]

    def write(handle, content):
        if fits := room.pop():
            room.append(0)
            return real(handle, content[:fits])
        raise OSError(errno.ENOSPC, "No space left on device")

    with MetricsWriter(path) as writer:
        writer.append({"n": 0})
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", write)
            with pytest.raises(OSError, match="No space"):
                writer.append({"n": 1})
        assert rows(path) == [{"n": 0}]
        writer.append({"n": 2})
        count, digest = writer.sync()
    assert rows(path) == [{"n": 0}, {"n": 2}]
    assert (count, digest) == (path.stat().st_size, hash_of(path.read_bytes()))
