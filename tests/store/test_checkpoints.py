"""Checkpoints: whole or not there, whatever happens to the files."""

from functools import partial

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ablate.base.files import hash_of, write_record
from ablate.store.checkpoints import (
    FORMAT,
    Snapshot,
    checkpointed_rows,
    load_newest,
    load_step,
    save_manifest,
    save_part,
)
from tests.exhaustive import rest_exhaustive

ROWS = b'{"a":1}\n{"a":2}\n'


@pytest.fixture
def metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(ROWS)
    return path


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "c"


@pytest.fixture
def save(folder, metrics):
    """Write a checkpoint as so many processes do, each with its rows of the weight; return what it holds."""

    def save(step, *, count=8, processes=1):
        draw = partial(torch.randn, generator=torch.Generator().manual_seed(step))
        tensors = {
            "model.w": draw(7, 5),
            "model.b": draw(5).to(torch.bfloat16),
            "model.steps": torch.arange(6).view(2, 3),
            "optimizer.0.step": torch.tensor(float(step)),
            "model.t": draw(4, 3).t(),
        }
        numbers = {"evaluations_above_bound": 1, "window": {"loss": 0.1 + 0.2}}
        rows = {metrics.name: (count, hash_of(metrics.read_bytes()[:count]))}
        parts = []
        for index, weight in enumerate(
            torch.tensor_split(tensors["model.w"], processes)
        ):
            of_process = tensors | {"model.w": weight}
            part = save_part(folder, step, of_process, index=index, count=processes)
            parts.append(part)
        sharded = {"model.w"} if processes > 1 else ()
        save_manifest(folder, step, parts, numbers=numbers, rows=rows, sharded=sharded)
        return Snapshot(step=step, tensors=tensors, numbers=numbers)

    return save


def same(loaded, saved):
    tensors = loaded.whole()
    return (
        (loaded.step, loaded.numbers) == (saved.step, saved.numbers)
        and tensors.keys() == saved.tensors.keys()
        and all(torch.equal(tensors[name], saved.tensors[name]) for name in tensors)
        and tensors["model.b"].dtype == torch.bfloat16
    )


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_what_some_processes_saved_is_loaded_to_the_bit(folder, save, processes):
    saved = save(3, processes=processes)
    loaded = load_step(folder, 3)
    assert same(loaded, saved)
    weight = loaded.tensors["model.w"]
    assert weight.shape == (7, 5)
    for first in range(8):
        for last in range(first, 9):
            assert torch.equal(
                weight.read(slice(first, last)), saved.tensors["model.w"][first:last]
            )


def test_the_last_two_are_kept_with_all_parts(folder, save):
    assert load_newest(folder) == (None, [])
    for step in (1, 2, 11, 10):
        save(step, processes=2)
    ends = ("0of2.safetensors", "1of2.safetensors", "json")
    kept = [f"{step:012d}.{end}" for step in (10, 11) for end in ends]
    assert sorted(path.name for path in folder.iterdir()) == kept
    assert load_newest(folder)[0].step == 11
    (folder / "000000000011.1of2.safetensors").unlink()
    loaded, passed_over = load_newest(folder)
    assert (loaded.step, len(passed_over)) == (10, 1)


@pytest.mark.parametrize("examples", rest_exhaustive([15, 150], (15).__eq__))
def test_a_flipped_bit_or_a_cut_anywhere_falls_back_to_the_one_before(
    folder, save, examples
):
    @settings(max_examples=examples)
    @given(
        data=st.data(),
        damaged=st.sampled_from([1, 2]),
        end=st.sampled_from(["json", "safetensors"]),
    )
    def holds(data, damaged, end):
        saved = [save(1), save(2)]
        path = folder / f"{damaged:012d}.{end}"
        content = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            content[place] ^= 1 << data.draw(st.integers(0, 7))
        else:
            del content[place:]
        path.write_bytes(content)
        loaded, passed_over = load_newest(folder)
        assert same(loaded, saved[2 - damaged])
        assert len(passed_over) == damaged - 1

    holds()


def test_a_manifest_of_another_kind(folder, save):
    save(1)
    for content in ({}, {"format": 1}, {"format": FORMAT, "files": 3}):
        write_record(folder / "000000000009.json", content)
        loaded, passed_over = load_newest(folder)
        assert (loaded.step, len(passed_over)) == (1, 1)


def test_a_failing_write_leaves_what_was_there(folder, save, monkeypatch):
    save(1)

    def full(_tensors, path, **_):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        save(2)
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".safetensors"]
    assert load_newest(folder)[0].step == 1


def test_a_checkpoint_vouches_for_the_rows_before_it_and_is_none_without_them(
    folder, save, metrics
):
    assert checkpointed_rows(folder, metrics.name) == (b"", [])
    save(1, count=8)
    save(2, count=16)
    metrics.write_bytes(ROWS + b'{"a":3}\n')
    assert checkpointed_rows(folder, metrics.name) == (ROWS, [])
    assert checkpointed_rows(folder, "diagnostics.jsonl") == (b"", [])
    fault = "000000000002.json: the rows of metrics.jsonl before it are damaged"
    before_it = ROWS[:8], [f"{folder}/{fault}"]
    for lost in (ROWS[:12], ROWS[:8] + b'{"a":7}\n'):  # in a power cut
        metrics.write_bytes(lost)
        assert checkpointed_rows(folder, metrics.name) == before_it
        loaded, passed_over = load_newest(folder)
        assert (loaded.step, passed_over) == (1, [f"checkpoint {fault}"])
    metrics.write_bytes(b'{"a":7}\n')
    assert load_newest(folder)[0] is None
    metrics.unlink()
    assert load_newest(folder)[0] is None
    (folder / "000000000001.json").write_text("{}")
    assert checkpointed_rows(folder, metrics.name)[0] == b""
