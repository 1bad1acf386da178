"""The stepper under every adapter, alone, in accelerate's loop and in torchao's ``quantize_``."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torchao.quantization import quantize_

from ablate.integrations import Stepper, applied_line
from ablate.integrations.torchao import AblateConfig, root
from ablate.recipes import read_recipe
from ablate.run.command import filled
from ablate.study import load_study
from tests.integrations.conftest import NOISY, rows_of, two_layers


def losses(stepper, model, steps):
    steps_losses, optimizer = [], torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(steps):
        x = torch.randn(
            32, 64, generator=torch.Generator().manual_seed(stepper.state.step)
        )
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        stepper.step()
        steps_losses.append(loss.item())
    return steps_losses


def test_a_study_gives_recipe_seed_and_tokens(in_study, capsys):
    handler = signal.getsignal(signal.SIGTERM)
    try:
        stepper = Stepper(two_layers())
        assert (stepper.state.recipe, stepper.state.seed) == (read_recipe(NOISY), 3)
        assert applied_line(read_recipe(NOISY)) in capsys.readouterr().out
        stepper.step()
        assert (stepper.state.step, stepper.state.tokens) == (1, 256)
        stepper.row(1, loss=2.5)
        stepper.row(1, val_loss=2.75)
        assert rows_of(in_study) == [
            {"step": 1, "loss": 2.5},
            {"step": 1, "val_loss": 2.75},
        ]
        assert not stepper.should_stop
        os.kill(os.getpid(), signal.SIGTERM)
        assert stepper.should_stop
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_the_plain_loop_of_the_docs_trains_and_resumes(in_study):
    page = (Path(__file__).parents[2] / "docs/training-scripts.md").read_text()
    section = page.partition("### A plain loop")[2]
    _, script, _, study, *_ = re.split(r"```\w*\n", section)
    (in_study / "train.py").write_text(script)
    (in_study / "loop.yaml").write_text(study)
    command = load_study(in_study / "loop.yaml").arms[1].trainer
    for steps in (50, 75):
        values = {
            "python": sys.executable,
            "seed": 3,
            "steps": steps,
            "run_dir": in_study,
        }
        words = [filled(word, values) for word in command.words]
        subprocess.run(words, cwd=in_study, check=True)
    rows = rows_of(in_study)
    assert [row["step"] for row in rows if "loss" in row] == [*range(1, 76)]
    losses = [row["val_loss"] for row in rows if "val_loss" in row]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 3


def test_another_recipe_than_the_arms_is_refused(in_study):
    with pytest.raises(ValueError, match="the study's arm has another recipe"):
        Stepper(two_layers(), "mxfp4")


def test_outside_of_a_study_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ABLATE_RUN_DIR", raising=False)
    monkeypatch.delenv("ABLATE_RECIPE", raising=False)
    with pytest.raises(ValueError, match="no recipe is given"):
        Stepper(two_layers())
    Stepper(two_layers(), NOISY).row(1, loss=2.5)
    assert not list(tmp_path.iterdir())


def test_a_resume_needs_the_state_and_an_end_needs_steps():
    stepper = Stepper(two_layers(), NOISY)
    stepper.check_resumed(0)
    with pytest.raises(
        RuntimeError, match="goes on after step 3, the recipe's state after 0"
    ):
        stepper.check_resumed(3)
    with pytest.raises(RuntimeError, match="never advanced"):
        stepper.check_ended()
    model = two_layers()
    by_tokens = Stepper(
        model,
        {
            "preset": "fp4-all-the-way",
            "phases": [{"from_tokens": 64, "recipe": "bf16"}],
        },
    )
    losses(by_tokens, model, 1)
    with pytest.raises(RuntimeError, match=r"without tokens: phases"):
        by_tokens.check_ended()


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.exhaustive)]
)
def test_accelerate_accumulates_compiles_and_resumes_to_the_bit(tmp_path, compiled):
    accelerate = pytest.importorskip("accelerate")

    def trained(batches, start=None, save=None):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, steps_losses = two_layers(), []
        stepper = Stepper(model, NOISY, seed=3)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        if compiled:
            model = torch.compile(model, backend="aot_eager")
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.register_for_checkpointing(stepper)
        if start is not None:
            accelerator.load_state(start)
        stepper.check_resumed(batches.start // 2)
        for batch in batches:
            with accelerator.accumulate(model):
                x = torch.randn(32, 64, generator=torch.Generator().manual_seed(batch))
                loss = model(x).pow(2).mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    stepper.step()
            steps_losses.append(loss.item())
        if save is not None:
            accelerator.save_state(save)
        return steps_losses

    state = tmp_path / "state"
    assert trained(range(4), save=state) + trained(range(4, 8), start=state) == trained(
        range(8)
    )


def test_torchao_applies_what_the_stepper_applies():
    config, model, plain = AblateConfig(NOISY, {"seed": 3}), two_layers(), two_layers()
    quantize_(model, config, filter_fn=root)
    assert losses(config.stepper, model, 3) == losses(
        Stepper(plain, NOISY, seed=3), plain, 3
    )


def test_torchao_takes_the_whole_model_alone():
    # By module every layer would draw the same noise.
    with pytest.raises(ValueError, match="takes the whole model"):
        quantize_(two_layers(), AblateConfig(NOISY))
