"""The layer under DDP and FSDP2, in two real processes that talk through gloo."""

import socket

import pytest
import torch
from torch import distributed, nn
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel

from ablate.numerics import apply_recipe

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


def make():
    torch.manual_seed(0)
    model = Model()
    apply_recipe(model, RECIPE, seed=3)
    return model


def one_process(x):
    model = make()
    y = model(x)
    y.square().mean().backward()
    return y.detach(), [parameter.grad for parameter in model.parameters()]


def start(rank, port):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)


def fsdp_worker(rank, port):
    from torch.distributed.fsdp import fully_shard

    start(rank, port)
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
        # Both ranks saw the same data: their mean is one process's gradient.
        assert torch.equal(parameter.grad.full_tensor(), grad)
    distributed.destroy_process_group()


def ddp_worker(rank, port):
    start(rank, port)
    half = X[rank * 64 : (rank + 1) * 64]
    _, own = one_process(half)
    model = DistributedDataParallel(make())
    model(half).square().mean().backward()
    for parameter, grad in zip(model.parameters(), own, strict=True):
        mean = grad.clone()
        distributed.all_reduce(mean)
        assert torch.allclose(parameter.grad, mean / WORLD, rtol=1e-6, atol=1e-9)
    distributed.destroy_process_group()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.skipif(not distributed.is_gloo_available(), reason="this torch has no gloo")
@pytest.mark.parametrize("worker", [fsdp_worker, ddp_worker], ids=["FSDP2", "DDP"])
def test_two_processes(worker):
    spawn(worker, args=(free_port(),), nprocs=WORLD)
