"""torchtitan's override, at the level of modules: its own linear layers, steps and a checkpoint by DCP."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip(
    "torchtitan",
    reason="torchtitan is not installed (its data sets are of another version)",
)
from torch.distributed import checkpoint
from torchtitan.components.optimizer import OptimizersContainer, default_adamw
from torchtitan.config import OverrideConfig, apply_overrides
from torchtitan.models.common.linear import Linear

from ablate.integrations.torchtitan import AblateOptimizers, apply
from ablate.layers.linear import QuantLinear

pytestmark = pytest.mark.exhaustive


def model():
    torch.manual_seed(0)
    first, last = (
        Linear(Linear.Config(in_features=64, out_features=count)) for count in (64, 32)
    )
    return torch.nn.Sequential(first, torch.nn.ReLU(), last)


def made():
    config = default_adamw(lr=1e-2)
    config.implementation = "for-loop"
    net = model()
    return net, apply(config).build(model_parts=[net])


def losses(net, optimizers, steps):
    """Two batches a step."""
    steps_losses = []
    for _ in range(steps):
        generator = torch.Generator().manual_seed(optimizers.stepper.state.step)
        for x in torch.randn(2, 32, 64, generator=generator):
            loss = net(x).pow(2).mean()
            loss.backward()
            steps_losses.append(loss.item())
        optimizers.step()
        optimizers.zero_grad()
    return steps_losses


@pytest.mark.parametrize("compiled", [False, True])
def test_it_accumulates_compiles_and_resumes_to_the_bit(in_study, tmp_path, compiled):
    net, optimizers = made()
    assert isinstance(optimizers, AblateOptimizers)
    assert isinstance(net[0], QuantLinear)
    assert isinstance(net[0], Linear)  # its other methods are there
    whole = losses(net, optimizers, 6)

    def run(net):
        return torch.compile(net, backend="aot_eager") if compiled else net

    net, optimizers = made()
    first = losses(run(net), optimizers, 3)
    state = {"model": net.state_dict(), "optimizer": optimizers.state_dict()}
    checkpoint.save(state, checkpoint_id=tmp_path / "3", no_dist=True)
    net, optimizers = made()
    state = {"model": net.state_dict(), "optimizer": optimizers.state_dict()}
    checkpoint.load(state, checkpoint_id=tmp_path / "3", no_dist=True)
    net.load_state_dict(state["model"])
    optimizers.load_state_dict(state["optimizer"])
    assert optimizers.stepper.state.step == 3
    assert first + losses(run(net), optimizers, 3) == whole


def test_pipeline_stages_are_refused(in_study):
    with pytest.raises(ValueError, match="pipeline stages"):
        apply(default_adamw(lr=1e-2)).build(model_parts=[model(), model()])


def test_it_is_found_by_its_name_on_the_command_line():
    from dataclasses import dataclass, field

    from torchtitan.config import Configurable

    class Root(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            optimizer: OptimizersContainer.Config = field(
                default_factory=lambda: default_adamw(lr=1e-2)
            )
            override: OverrideConfig = field(default_factory=OverrideConfig)

    config = Root.Config(
        override=OverrideConfig(imports=["ablate.integrations.torchtitan.apply"])
    )
    apply_overrides(config.override, config)
    assert isinstance(config.optimizer, AblateOptimizers.Config)
