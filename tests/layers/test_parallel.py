"""The layer under DDP and FSDP2, in two real processes that talk through gloo."""

import os
from operator import attrgetter

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel

from ablate.numerics import apply_recipe
from tests.exhaustive import rest_exhaustive
from tests.numerics.strategies import normal
from tests.tensors import assert_same

WORLD = 2
RECIPE = {
    "gemms": ["fprop", "dgrad", "wgrad"],
    "stabiliser": "sr+rht",
    "weight_block": "none",
}
X = normal(128, 64, seed=1)


def make():
    torch.manual_seed(0)
    return nn.Sequential(
        *(layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.ReLU()))
    )


def one_process(x, replica=None):
    model = make()
    apply_recipe(model, RECIPE, seed=3).replica = replica
    y = model(x)
    y.square().mean().backward()
    return y.detach(), [parameter.grad for parameter in model.parameters()]


def sharded(model):
    for layer in model[::2]:
        fully_shard(layer)
    return fully_shard(model)


def worker(rank, meeting, wrap, recipe_first):
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD
    )
    x = X if wrap is sharded else X[rank * 64 : (rank + 1) * 64]
    expected, grads = one_process(x)
    of_this_rank, of_the_first = (one_process(x, replica)[1] for replica in (rank, 0))
    assert_same(of_this_rank, grads)
    assert torch.equal(grads[-2], of_the_first[-2]) == (rank == 0), (
        "noise of each rank's own"
    )
    model = make()
    if recipe_first:
        apply_recipe(model, RECIPE, seed=3)
        wrapped = wrap(model)
    else:
        wrapped = fully_shard(model) if wrap is sharded else wrap(model)
        apply_recipe(wrapped, RECIPE, seed=3)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (saved.append(t), t)[1], lambda t: t
    ):
        y = wrapped(x)
    weights = [t for t in saved if t.shape == (64, 64) and isinstance(t, nn.Parameter)]
    assert len(weights) == 3, "the parameter itself, no cast copy"
    if wrap is sharded and recipe_first:
        freed = [t.untyped_storage().size() == 0 for t in weights]
        assert all(freed), "no saved tensor keeps a gathered weight alive after forward"
    y.square().mean().backward()
    if wrap is sharded or recipe_first:
        assert torch.equal(y, expected), (
            "the quantised sharded weight is that of the whole"
        )
    else:  # DDP's names of layers have noise of their own
        grads = [parameter.grad.clone() for parameter in wrapped.parameters()]
    for parameter, grad in zip(wrapped.parameters(), grads, strict=True):
        distributed.all_reduce(grad)
        whole = parameter.grad.full_tensor() if wrap is sharded else parameter.grad
        assert torch.allclose(whole, grad / WORLD, rtol=1e-6, atol=1e-9)
    if wrap is sharded and not recipe_first:
        alone = nn.Sequential(sharded(make())[0], nn.Linear(64, 64))
        with pytest.raises(
            ValueError,
            match="0: fully_shard made it a layer of its own kind: apply the rec",
        ):
            apply_recipe(alone, RECIPE)
    distributed.destroy_process_group()
    # With gloo's threads alive the interpreter's own end aborts now and then (torch 2.13).
    os._exit(0)


@pytest.mark.skipif(
    not distributed.is_gloo_available(), reason="this torch has no gloo"
)
@pytest.mark.parametrize(
    "wrap",
    rest_exhaustive(
        [sharded, DistributedDataParallel],
        lambda one: one is not sharded,
        ids=attrgetter("__name__"),
    ),
)
@pytest.mark.parametrize("recipe_first", rest_exhaustive([True, False], bool))
def test_two_processes(wrap, recipe_first, tmp_path):
    spawn(worker, args=(str(tmp_path / "meeting"), wrap, recipe_first), nprocs=WORLD)
