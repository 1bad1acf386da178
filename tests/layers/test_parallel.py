"""The layer under DDP and FSDP2, in two real processes that talk through gloo."""

import os

import pytest
import torch
from torch import distributed, nn
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel

from ablate.numerics import apply_recipe
from tests.exhaustive import rest_exhaustive

WORLD = 2
RECIPE = {"gemms": ["fprop", "dgrad", "wgrad"], "stabiliser": "sr+rht", "weight_block": "none"}
X = torch.randn(128, 64, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def make(replica=None):
    torch.manual_seed(0)
    model = Model()
    apply_recipe(model, RECIPE, seed=3).replica = replica
    return model


def one_process(x, replica=None):
    model = make(replica)
    y = model(x)
    y.square().mean().backward()
    return y.detach(), [parameter.grad for parameter in model.parameters()]


def start(rank, meeting):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD)


def finish():
    distributed.destroy_process_group()
    # With gloo's threads alive the interpreter's own end aborts now and then (torch 2.13).
    os._exit(0)


def fsdp_worker(rank, meeting):
    from torch.distributed.fsdp import fully_shard

    start(rank, meeting)
    expected, expected_grads = one_process(X)
    model = make()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        y = model(X)
    assert torch.equal(y, expected), "the quantised sharded weight is that of the whole"
    weights = [t for t in saved if t.shape == (64, 64)]  # activations have 128 rows
    assert len(weights) == 3
    assert all(isinstance(t, nn.Parameter) for t in weights), "the parameter itself, no cast copy"
    freed = [t.untyped_storage().size() == 0 for t in weights]
    assert all(freed), "no saved tensor keeps a gathered weight alive after forward"
    y.square().mean().backward()
    for parameter, grad in zip(model.parameters(), expected_grads, strict=True):
        own = grad.clone()
        distributed.all_reduce(grad)
        assert not torch.equal(own, grad / WORLD), "the same data, and noise of each rank's own"
        assert torch.allclose(parameter.grad.full_tensor(), grad / WORLD, rtol=1e-6, atol=1e-9)
    finish()


def fsdp_first_worker(rank, meeting):
    from torch.distributed.fsdp import fully_shard

    start(rank, meeting)
    expected, expected_grads = one_process(X)
    torch.manual_seed(0)
    model = Model()
    fully_shard(model)
    apply_recipe(model, RECIPE, seed=3)
    y = model(X)
    assert torch.equal(y, expected)
    y.square().mean().backward()
    for parameter, grad in zip(model.parameters(), expected_grads, strict=True):
        distributed.all_reduce(grad)
        assert torch.allclose(parameter.grad.full_tensor(), grad / WORLD, rtol=1e-6, atol=1e-9)
    alone = nn.Sequential(fully_shard(nn.Linear(64, 64)), nn.Linear(64, 64))
    with pytest.raises(ValueError, match="0: fully_shard made it a layer of its own kind: apply the recipe"):
        apply_recipe(alone, RECIPE)
    finish()


def ddp_first_worker(rank, meeting):
    start(rank, meeting)
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    apply_recipe(model, RECIPE, seed=3)
    half = X[rank * 64 : (rank + 1) * 64]
    model(half).square().mean().backward()
    for parameter in model.parameters():
        mean = parameter.grad.clone()
        distributed.all_reduce(mean)
        assert torch.allclose(parameter.grad, mean / WORLD, rtol=1e-6, atol=1e-9), "shared after backward"
    finish()


def ddp_worker(rank, meeting):
    start(rank, meeting)
    mine, of_its_replica = one_process(X), one_process(X, replica=rank)
    assert all(torch.equal(a, b) for a, b in zip(mine[1], of_its_replica[1], strict=True))
    of_the_first = one_process(X, replica=0)
    assert torch.equal(mine[1][-2], of_the_first[1][-2]) == (rank == 0)
    half = X[rank * 64 : (rank + 1) * 64]
    _, own = one_process(half)
    model = DistributedDataParallel(make())
    model(half).square().mean().backward()
    for parameter, grad in zip(model.parameters(), own, strict=True):
        mean = grad.clone()
        distributed.all_reduce(mean)
        assert torch.allclose(parameter.grad, mean / WORLD, rtol=1e-6, atol=1e-9)
    finish()


@pytest.mark.skipif(not distributed.is_gloo_available(), reason="this torch has no gloo")
@pytest.mark.parametrize(
    "worker",
    rest_exhaustive(
        [fsdp_worker, ddp_worker, fsdp_first_worker, ddp_first_worker],
        lambda worker: worker is ddp_first_worker,
        lambda worker: worker.__name__,
    ),
)
def test_two_processes(worker, tmp_path):
    spawn(worker, args=(str(tmp_path / "meeting"),), nprocs=WORLD)
