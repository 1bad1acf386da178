"""Lightning's precision plug-in: optimizer steps, not batches; its state in Lightning's checkpoint."""

import pytest
import torch

from tests.integrations.conftest import NOISY, two_layers

lightning = pytest.importorskip("lightning")

X = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.losses = two_layers(), {}

    def training_step(self, batch, _):
        loss = self.net(batch[0]).float().pow(2).mean()
        self.losses.setdefault(self.trainer.global_step, []).append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def trained(steps, checkpoint=None, *, compiled=False):
    """``steps`` of two batches each; every batch is the same, because Lightning begins the data anew."""
    from ablate.integrations.lightning import AblatePrecision

    module, plugin = Module(), AblatePrecision(NOISY, seed=3)
    trainer = lightning.Trainer(
        max_steps=steps, plugins=[plugin], accumulate_grad_batches=2, enable_checkpointing=False,
        logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", devices=1,
    )  # fmt: skip
    data = torch.utils.data.TensorDataset(X.repeat(20, 1, 1))
    model = torch.compile(module, backend="aot_eager") if compiled else module
    trainer.fit(
        model, torch.utils.data.DataLoader(data, batch_size=None), ckpt_path=checkpoint
    )
    return module, trainer, plugin


def test_resumes_to_the_bit_and_refuses_without_the_state(tmp_path):
    whole, _, plugin = trained(6)
    assert plugin.stepper.state.step == 6
    assert [len(losses) for losses in whole.losses.values()] == [2] * 6
    _, trainer, _ = trained(3)
    place = tmp_path / "last.ckpt"
    trainer.save_checkpoint(place)
    resumed, *_ = trained(6, place)
    assert resumed.losses == {
        step: losses for step, losses in whole.losses.items() if step >= 3
    }
    content = torch.load(place, weights_only=True)
    del content["AblatePrecision"]
    torch.save(content, place)
    with pytest.raises(
        RuntimeError, match="goes on after step 3, the recipe's state after 0"
    ):
        trained(6, place)


@pytest.mark.exhaustive
def test_compiled_it_computes_the_same_bits():
    assert trained(2, compiled=True)[0].losses == trained(2)[0].losses
