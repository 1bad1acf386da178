"""Checkpoints: whole or not there, whatever happens to the files."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ablate.store.checkpoints import (
    Checkpoint,
    drop_checkpoints,
    hash_of_prefix,
    load_newest,
    save_checkpoint,
)

ROWS = b'{"a":1}\n{"a":2}\n'


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
    return Checkpoint(
        step=step, tensors=tensors, numbers=numbers, metrics_bytes=count,
        metrics_hash=hash_of_prefix(metrics, count),
    )  # fmt: skip


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
            torch.equal(found.tensors[name], tensor) and found.tensors[name].dtype == tensor.dtype
            for name, tensor in saved.tensors.items()
        )
    )


def test_what_is_saved_is_loaded_to_the_bit(tmp_path, metrics):
    saved = checkpoint(3, metrics)
    save_checkpoint(tmp_path / "c", saved)
    found, passed_over = load_newest(tmp_path / "c", metrics)
    assert passed_over == []
    assert same(found, saved)


def test_the_last_two_are_kept_and_the_newest_is_taken(tmp_path, metrics):
    for step in (1, 2, 11, 10):
        save_checkpoint(tmp_path, checkpoint(step, metrics))
    names = sorted(path.name for path in tmp_path.iterdir() if path != metrics)
    assert names == [f"{step:012d}.{end}" for step in (10, 11) for end in ("json", "safetensors")]
    assert load_newest(tmp_path, metrics)[0].step == 11


def test_none_at_first_and_none_after_the_end(tmp_path, metrics):
    assert load_newest(tmp_path / "c", metrics) == (None, [])
    save_checkpoint(tmp_path / "c", checkpoint(1, metrics))
    (tmp_path / "c" / ".000000000002.safetensors.99").write_bytes(b"left by a kill")
    drop_checkpoints(tmp_path / "c")
    assert not (tmp_path / "c").exists()
    drop_checkpoints(tmp_path / "c")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
@given(data=st.data(), newest=st.booleans())
def test_a_flipped_bit_or_a_cut_anywhere_falls_back_to_the_one_before(tmp_path, metrics, data, newest):
    folder = tmp_path / "c"
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
    found, passed_over = load_newest(folder, metrics)
    if newest:
        # White space that a flip turned into other white space is no damage.
        assert same(found, saved[0]) or (end == "json" and same(found, saved[1]))
        assert bool(passed_over) == (found.step == 1)
    else:
        assert same(found, saved[1])


def test_metrics_that_are_not_those_it_was_made_with(tmp_path, metrics):
    save_checkpoint(tmp_path / "c", checkpoint(1, metrics, count=8))
    save_checkpoint(tmp_path / "c", checkpoint(2, metrics, count=16))
    metrics.write_bytes(ROWS[:12])  # lost in a power cut
    found, passed_over = load_newest(tmp_path / "c", metrics)
    assert found.step == 1
    assert passed_over == ["checkpoint 000000000002.json: metrics.jsonl has fewer than 16 bytes"]
    metrics.write_bytes(b'{"a":7}\n')
    assert load_newest(tmp_path / "c", metrics)[0] is None
    metrics.unlink()
    assert load_newest(tmp_path / "c", metrics)[0] is None


@pytest.mark.parametrize(
    "content", ["null", "[]", "{}", '"x"', "1", "not JSON", '{"format": 1}', '{"manifest_hash": "x"}']
)
def test_a_manifest_of_another_kind(tmp_path, metrics, content):
    save_checkpoint(tmp_path / "c", checkpoint(1, metrics))
    (tmp_path / "c" / "000000000009.json").write_text(content)
    found, passed_over = load_newest(tmp_path / "c", metrics)
    assert found.step == 1
    assert len(passed_over) == 1


def test_a_failing_write_leaves_what_was_there(tmp_path, metrics, monkeypatch):
    import safetensors.torch

    save_checkpoint(tmp_path / "c", checkpoint(1, metrics))

    def full(_tensors, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(tmp_path / "c", checkpoint(2, metrics))
    assert sorted(path.suffix for path in (tmp_path / "c").iterdir()) == [".json", ".safetensors"]
    assert load_newest(tmp_path / "c", metrics)[0].step == 1


def test_the_manifest_is_plain_json_and_the_tensors_hold_no_code(tmp_path, metrics):
    save_checkpoint(tmp_path, checkpoint(1, metrics))
    manifest = json.loads((tmp_path / "000000000001.json").read_text())
    assert manifest["metrics_bytes"] == 8
    pickle = tmp_path / "000000000001.safetensors"
    torch.save({"x": 1}, pickle)  # a pickle under that name is not read as one
    assert load_newest(tmp_path, metrics)[0] is None
