"""Processes that train one run together, through gloo: the curve of one, to the bit where it can be."""

import itertools
import json
import uuid
from collections import defaultdict
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context

import pytest
import torch
from torch import distributed

from ablate.backends.testing.suite import one_thread
from ablate.diagnose.recorder import Recorder
from ablate.execute.side_tasks import Keeper
from ablate.run.config import ModelConfig
from ablate.run.diagnostics import Diagnostics
from ablate.store.checkpoints import load_newest
from ablate.store.metrics import MetricsWriter
from ablate.train.group import ALONE, Layout, join_group
from tests.curves import after, curve

ALL = {"gemms": ["fprop", "dgrad", "wgrad"], "stabiliser": "sr+rht"}
NVFP4 = {"preset": "nvidia-nvfp4", "layers": [{"last": 1, "recipe": "bf16"}]}
RESET = {
    "gemms": ["fprop"],
    "weight_block": "32x32",
    "deoscillate": {"window": 2, "threshold": 1.1},
}
MODELS = {
    "llama": {},
    "untied": {"tied_head": False, "kv_heads": 1},
    "gpt": {"architecture": "gpt"},
    "experts": {"experts": 3},
}
SHORT = {"tokens": 4096, "eval_every_tokens": 1024}


@pytest.fixture(autouse=True)
def as_in_a_group():
    """Use one thread, as each process of a group does here: sums over threads have an order of their own."""
    with one_thread():
        yield


def member(
    rank, size, folder, meet, config, tokens, stop_after=0, diagnostics=None, **layout
):
    """Train in one process of a group; return the state, the steps, the rows and what was diagnosed."""
    torch.set_num_threads(1)
    group = ALONE
    if size > 1:
        distributed.init_process_group(
            "gloo", init_method=f"file://{folder / meet}", rank=rank, world_size=size,
            timeout=timedelta(minutes=5),
        )  # fmt: skip
        group = join_group("cpu")
    diagnosed = []

    def observe(trainee):
        if diagnostics and rank == 0:  # as the worker has it
            return Recorder(trainee, diagnostics, diagnosed.append)
        return None

    start, _ = load_newest(folder / "c")
    # the first process writes the manifest, because it has the rows
    writers = [MetricsWriter(folder / "metrics", 0)] if rank == 0 else []
    keeper = Keeper(folder / "c", writers, start, every_sec=1e9, group=group)
    # one process alone is told to stop
    should_stop = after(stop_after if rank == size - 1 else 0)
    result, rows = curve(
        config, tokens, checkpoints=keeper, should_stop=should_stop, observe=observe,
        layout=Layout(group=group, **layout),
    )  # fmt: skip
    if size > 1:
        distributed.destroy_process_group()
    return result.state, result.step, rows, diagnosed


@pytest.fixture(scope="module")
def pools():
    """By size of the group, a process of each rank: what torch keeps of one size is no good for another."""
    found = defaultdict(list)
    yield found
    for pool in itertools.chain(*found.values()):
        pool.shutdown(wait=False)


@pytest.fixture
def together(pools, tmp_path, tokens):
    """Train in a group of processes (``size`` 1: in this one); return what ``member`` does in the first."""

    def run(config, size=2, folder="run", **options):
        # A file of its own for each group: an old group writes into its file once more when it is collected.
        task = (tmp_path / folder, f"meet-{uuid.uuid4().hex}", config, tokens)
        task[0].mkdir(exist_ok=True)
        if size == 1:
            return member(0, 1, *task, **options)
        context = get_context("spawn")
        for _ in range(size - len(pools[size])):
            pools[size].append(ProcessPoolExecutor(1, mp_context=context))
        futures = [
            pool.submit(member, rank, size, *task, **options)
            for rank, pool in enumerate(pools[size])
        ]
        for future in wait(futures, return_when=FIRST_EXCEPTION).done:
            future.result()
        return futures[0].result()

    return run


def losses(rows):
    return [row.get("val_loss", row.get("loss")) for row in rows]


@pytest.mark.exhaustive
def test_the_first_process_measures_what_one_alone_would(make_config, together):
    """Its micro-batch is the first, and the gathered weight is whole when it is copied."""
    config = make_config(
        ALL, tokens=2048, eval_every_tokens=1024, micro_batch_size=8, grad_clip=None
    )
    diagnostics = Diagnostics(every_tokens=1024, layers=["*"], draws=2)
    *_, found = together(config, 1, "alone", diagnostics=diagnostics)
    *both, measured = together(config, diagnostics=diagnostics)
    *plain, _ = together(config, folder="plain")
    assert both == plain
    assert measured == found
    assert len({(row["layer"], row["gemm"]) for row in found}) == 24


@pytest.mark.parametrize(("model", "recipe"), [
    ("gpt", ALL),
    *(pytest.param(*case, marks=pytest.mark.exhaustive)
      for case in (("llama", ALL), ("untied", NVFP4), ("llama", RESET), ("experts", ALL))),
])  # fmt: skip
def test_two_processes_have_the_curve_of_one_to_the_bit(
    make_config, together, model, recipe
):
    """Two micro-batches, one each: their sum has one order. Clipping is off, whose norm is another sum."""
    shape = {"layers": 3, **MODELS[model]}
    config = make_config(
        recipe, model=shape, micro_batch_size=8, grad_clip=None, **SHORT
    )
    state, _, alone, _ = together(config, 1, "alone")
    rows = together(config)[2]
    assert (state, losses(rows)) == ("finished", losses(alone))
    assert any(row.get("weights_reset") for row in rows) == ("deoscillate" in recipe)
    for row, row_alone in zip(rows, alone, strict=True):
        assert row.get("weights_reset") == row_alone.get("weights_reset")
        norm = row_alone.get("grad_norm", 0)  # a sum over other rows
        assert row.get("grad_norm", 0) == pytest.approx(norm, rel=1e-5)


def test_clipping_and_shares_of_the_batch_differ_by_the_order_of_sums_alone(
    make_config, together
):
    """Without a micro-batch size each process takes its half of the batch."""
    alone = together(make_config(ALL, micro_batch_size=8, **SHORT), 1, "alone")[2]
    rows = together(make_config(ALL, **SHORT))[2]
    assert losses(rows) == pytest.approx(losses(alone), abs=0.01)
    assert losses(rows)[0] == losses(alone)[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [(1, 2), (2, 3)])
def test_a_run_goes_on_with_another_number_of_devices(
    make_config, together, tmp_path, sizes
):
    recipe = RESET | {"deoscillate": {"window": 4, "threshold": 1.1}}
    config = make_config(
        recipe, tokens=6144, eval_every_tokens=1536, batch_size=12, micro_batch_size=2
    )
    whole = together(config, 1, "whole")[2]
    state, step, begun, _ = together(config, sizes[0], stop_after=7)
    assert (state, step) == ("interrupted", 7)
    assert len(list((tmp_path / "run" / "c").glob("*.safetensors"))) == sizes[0]
    state, step, rest, _ = together(config, sizes[1])
    assert (state, step) == ("finished", 16)
    assert losses(begun + rest) == pytest.approx(losses(whole), abs=0.01)


def test_a_resumed_group_goes_on_to_the_same_bits(make_config, together):
    config = make_config(ALL, evaluate_in="both", **SHORT)
    whole = together(config, folder="whole")[2]
    _, step, begun, _ = together(config, stop_after=3)
    assert step == 3
    assert begun + together(config)[2] == whole


def test_lower_precision_of_weights_and_sums_trains_and_a_divergence_is_found_in_all(
    make_config, together
):
    rows = together(make_config(master_weights="bf16", reduction="bf16", **SHORT))[2]
    assert losses(rows)[-1] < losses(rows)[0]
    hot = make_config(ALL, learning_rate=1e4, grad_clip=None)
    assert together(hot, folder="hot")[0] == "diverged"


@pytest.mark.parametrize("model", [{}, {"experts": 3}])
def test_computing_activations_twice_changes_no_bit(make_config, together, model):
    config = make_config(ALL, model=model, tokens=1024, eval_every_tokens=512)
    assert together(config, 1, "once") == together(
        config, 1, "twice", checkpoint_activations=True
    )


def test_a_model_without_blocks_cannot_be_laid_out_by_blocks(
    make_config, together, tmp_path
):
    (tmp_path / "m.py").write_text(
        "from torch import nn\ndef build(*, vocab_size, seq_len):\n"
        "    return nn.Sequential(nn.Embedding(vocab_size, 32), nn.Linear(32, vocab_size))\n"
    )
    config = replace(
        make_config(), model=ModelConfig(function=f"{tmp_path}/m.py:build")
    )
    with pytest.raises(ValueError, match="activation_checkpointing needs blocks"):
        together(config, 1, checkpoint_activations=True)


@pytest.mark.exhaustive
def test_a_hugging_face_model_has_the_curve_of_one_process_with_dropout(
    tmp_path, make_config, together
):
    pytest.importorskip("transformers")
    content = {
        "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 64,
    }  # fmt: skip
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(content))
    config = make_config(
        ALL, tokens=2048, eval_every_tokens=1024, micro_batch_size=8, grad_clip=None
    )
    config = replace(config, model=ModelConfig(hf=str(tmp_path / "hf")))
    rows = together(config, checkpoint_activations=True)[2]
    assert losses(rows) == losses(together(config, 1, "alone")[2])
