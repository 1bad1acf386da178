"""The metrics file of an attempt."""

from __future__ import annotations

import errno
import json
import os

import pytest

from ablate.base.files import hash_of
from ablate.store.metrics import MetricsWriter


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_appended_and_counted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        assert path.read_bytes() == b""
        for n in range(3):
            writer.append({"n": n})
            assert rows(path) == [{"n": i} for i in range(n + 1)]  # there at once, for those who look on
        count, digest = writer.sync()
    assert (count, digest) == (path.stat().st_size, hash_of(path.read_bytes()))


def test_a_new_attempt_keeps_the_prefix_it_is_told(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"n":0}\n{"n":1}\n{"n"')
    with MetricsWriter(path, keep_bytes=8) as writer:
        writer.append({"n": 7})
        count, digest = writer.sync()
    assert rows(path) == [{"n": 0}, {"n": 7}]
    assert (count, digest) == (path.stat().st_size, hash_of(path.read_bytes()))


def test_a_worker_that_was_given_up_for_dead_writes_to_nobody(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as dead:
        dead.append({"n": 0})
        with MetricsWriter(path, keep_bytes=dead.bytes) as successor:
            dead.append({"n": "late"})
            successor.append({"n": 1})
            dead.append({"n": "later"})
    assert rows(path) == [{"n": 0}, {"n": 1}]


@pytest.mark.parametrize("part", [0, 3])
def test_a_row_that_does_not_fit_is_taken_back_whole(tmp_path, monkeypatch, part):
    path = tmp_path / "metrics.jsonl"
    real = os.write
    full = []

    def write(handle, content):
        if not full:
            return real(handle, content)
        if full[0] == "part" and part:
            full[0] = "none"
            return real(handle, content[:part])
        raise OSError(errno.ENOSPC, "No space left on device")

    with MetricsWriter(path) as writer:
        writer.append({"n": 0})
        monkeypatch.setattr(os, "write", write)
        full.append("part")
        with pytest.raises(OSError, match="No space"):
            writer.append({"n": 1})
        assert rows(path) == [{"n": 0}]
        full.clear()
        writer.append({"n": 2})
        count, digest = writer.sync()
    assert rows(path) == [{"n": 0}, {"n": 2}]
    assert (count, digest) == (path.stat().st_size, hash_of(path.read_bytes()))


def test_only_finite_numbers(tmp_path):
    with MetricsWriter(tmp_path / "m") as writer, pytest.raises(ValueError, match="not JSON compliant"):
        writer.append({"loss": float("nan")})
