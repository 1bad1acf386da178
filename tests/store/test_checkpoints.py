"""Checkpoints: whole or not there, whatever happens to the files."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ablate.base.files import hash_of
from ablate.store.checkpoints import (
    checkpointed_rows,
    drop_checkpoints,
    load_newest,
    load_step,
    save_manifest,
    save_part,
)

ROWS = b'{"a":1}\n{"a":2}\n'


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What goes into a checkpoint."""

    step: int
    tensors: dict
    numbers: dict
    rows: dict


def save_checkpoint(folder, saved, processes=1):
    """Write a checkpoint as so many processes do, each with its rows of the weight."""
    parts = []
    for index in range(processes):
        own = dict(saved.tensors)
        if processes > 1:
            chunks = torch.chunk(own["model.w"], processes)
            own["model.w"] = chunks[index] if index < len(chunks) else own["model.w"][:0]
        parts.append(save_part(folder, saved.step, own, index=index, count=processes))
    save_manifest(
        folder, saved.step, parts, numbers=saved.numbers, rows=saved.rows,
        sharded={"model.w"} if processes > 1 else (),
    )  # fmt: skip


def checkpoint(step, metrics, count=8):
    generator = torch.Generator().manual_seed(step)
    tensors = {
        "model.w": torch.randn(7, 5, generator=generator),
        "model.b": torch.randn(5, generator=generator).to(torch.bfloat16),
        "model.steps": torch.arange(6).view(2, 3),
        "optimizer.0.step": torch.tensor(float(step)),
        "model.t": torch.randn(4, 3, generator=generator).t(),
    }
    numbers = {"evaluations_above_bound": 1, "window": {"loss": 0.1 + 0.2, "steps": step}}
    rows = {metrics.name: (count, hash_of(metrics.read_bytes()[:count]))}
    return Saved(step=step, tensors=tensors, numbers=numbers, rows=rows)


@pytest.fixture
def metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(ROWS)
    return path


def same(found, saved):
    return (
        found.step == saved.step
        and found.numbers == saved.numbers
        and found.tensors.keys() == saved.tensors.keys()
        and all(
            torch.equal(read, tensor) and read.dtype == tensor.dtype
            for name, tensor in saved.tensors.items()
            for read in [found.tensors[name].read(slice(None))]
        )
    )


def test_what_is_saved_is_loaded_to_the_bit(tmp_path, metrics):
    saved = checkpoint(3, metrics)
    save_checkpoint(tmp_path / "c", saved)
    found, passed_over = load_newest(tmp_path / "c")
    assert passed_over == []
    assert same(found, saved)


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_what_several_processes_saved_is_one_checkpoint(tmp_path, metrics, processes):
    saved = checkpoint(3, metrics)
    save_checkpoint(tmp_path / "c", saved, processes)
    found = load_step(tmp_path / "c", 3)
    assert same(found, saved)
    weight = found.tensors["model.w"]
    assert weight.shape == (7, 5)
    for first in range(8):
        for last in range(first, 9):
            assert torch.equal(weight.read(slice(first, last)), saved.tensors["model.w"][first:last])


def test_all_parts_of_old_checkpoints_go_and_a_missing_part_is_seen(tmp_path, metrics):
    for step in (1, 2, 3):
        save_checkpoint(tmp_path / "c", checkpoint(step, metrics), 2)
    assert len(list((tmp_path / "c").glob("*.safetensors"))) == 4
    (tmp_path / "c" / "000000000003.1of2.safetensors").unlink()
    found, passed_over = load_newest(tmp_path / "c")
    assert found.step == 2
    assert len(passed_over) == 1
    drop_checkpoints(tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_the_last_two_are_kept_and_the_newest_is_taken(tmp_path, metrics):
    for step in (1, 2, 11, 10):
        save_checkpoint(tmp_path / "c", checkpoint(step, metrics))
    names = sorted(path.name for path in (tmp_path / "c").iterdir())
    assert names == [f"{step:012d}.{end}" for step in (10, 11) for end in ("json", "safetensors")]
    assert load_newest(tmp_path / "c")[0].step == 11


def test_none_at_first_and_none_after_the_end(tmp_path, metrics):
    assert load_newest(tmp_path / "c") == (None, [])
    save_checkpoint(tmp_path / "c", checkpoint(1, metrics))
    (tmp_path / "c" / ".000000000002.safetensors.99").write_bytes(b"left by a kill")
    drop_checkpoints(tmp_path / "c")
    assert not (tmp_path / "c").exists()
    drop_checkpoints(tmp_path / "c")


@pytest.mark.parametrize(
    "examples", [pytest.param(15, id="some"), pytest.param(150, id="all", marks=pytest.mark.exhaustive)]
)
def test_a_flipped_bit_or_a_cut_anywhere_falls_back_to_the_one_before(tmp_path, metrics, examples):
    @settings(max_examples=examples)
    @given(data=st.data(), newest=st.booleans())
    def holds(data, newest):
        check_fallback(tmp_path / "c", metrics, data, newest)

    holds()


def check_fallback(folder, metrics, data, newest):
    saved = [checkpoint(step, metrics) for step in (1, 2)]
    for one in saved:
        save_checkpoint(folder, one)
    damaged = 2 if newest else 1
    end = data.draw(st.sampled_from(["json", "safetensors"]))
    path = folder / f"{damaged:012d}.{end}"
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[at:]
    path.write_bytes(content)
    found, passed_over = load_newest(folder)
    if newest:
        assert same(found, saved[0])
        assert len(passed_over) == 1
    else:
        assert same(found, saved[1])


def test_metrics_that_are_not_those_it_was_made_with(tmp_path, metrics):
    save_checkpoint(tmp_path / "c", checkpoint(1, metrics, count=8))
    save_checkpoint(tmp_path / "c", checkpoint(2, metrics, count=16))
    metrics.write_bytes(ROWS[:12])  # lost in a power cut
    found, passed_over = load_newest(tmp_path / "c")
    assert found.step == 1
    assert passed_over == ["checkpoint 000000000002.json: the rows of metrics.jsonl before it are damaged"]
    metrics.write_bytes(b'{"a":7}\n')
    assert load_newest(tmp_path / "c")[0] is None
    metrics.unlink()
    assert load_newest(tmp_path / "c")[0] is None


@pytest.mark.parametrize(
    "content", ["null", "[]", "{}", '"x"', "1", "not JSON", '{"format": 1}', '{"manifest_hash": "x"}']
)
def test_a_manifest_of_another_kind(tmp_path, metrics, content):
    save_checkpoint(tmp_path / "c", checkpoint(1, metrics))
    (tmp_path / "c" / "000000000009.json").write_text(content)
    found, passed_over = load_newest(tmp_path / "c")
    assert found.step == 1
    assert len(passed_over) == 1


def test_a_failing_write_leaves_what_was_there(tmp_path, metrics, monkeypatch):
    import safetensors.torch

    save_checkpoint(tmp_path / "c", checkpoint(1, metrics))

    def full(_tensors, path, **_):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(tmp_path / "c", checkpoint(2, metrics))
    assert sorted(path.suffix for path in (tmp_path / "c").iterdir()) == [".json", ".safetensors"]
    assert load_newest(tmp_path / "c")[0].step == 1


def test_the_manifest_is_plain_json_and_the_tensors_hold_no_code(tmp_path, metrics):
    save_checkpoint(tmp_path / "c", checkpoint(1, metrics))
    manifest = json.loads((tmp_path / "c" / "000000000001.json").read_text())
    assert manifest["rows"]["metrics.jsonl"][0] == 8
    pickle = tmp_path / "c" / "000000000001.safetensors"
    torch.save({"x": 1}, pickle)  # a pickle under that name is not read as one
    assert load_newest(tmp_path / "c")[0] is None


def test_the_newest_checkpoint_vouches_for_the_rows_before_it(tmp_path, metrics):
    folder = tmp_path / "c"
    assert checkpointed_rows(folder, metrics.name) == (b"", [])
    for step, count in ((1, 8), (2, 16)):
        save_checkpoint(folder, checkpoint(step, metrics, count))
    metrics.write_bytes(ROWS + b'{"a":3}\n')
    assert checkpointed_rows(folder, metrics.name) == (ROWS, [])
    assert checkpointed_rows(folder, "diagnostics.jsonl") == (b"", [])
    metrics.write_bytes(ROWS[:8] + b'{"a":7}\n')
    rows, faults = checkpointed_rows(folder, metrics.name)
    assert rows == ROWS[:8]
    assert faults == [f"{folder}/000000000002.json: the rows of metrics.jsonl before it are damaged"]
    (folder / "000000000001.json").write_text("{}")
    assert checkpointed_rows(folder, metrics.name)[0] == b""
    assert len(checkpointed_rows(folder, metrics.name)[1]) == 2
