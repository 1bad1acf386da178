"""Hugging Face's Trainer and TRL's: counted steps, a state in the checkpoint, resumes to the bit."""

import functools
import json

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("trl")
import trl
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from ablate.integrations.hf import AblateCallback
from tests.integrations.conftest import NOISY, rows_of

ARGUMENTS = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1, "save_steps": 3,
    "save_strategy": "steps", "report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 1,
    "learning_rate": 1e-3, "lr_scheduler_type": "constant",
}  # fmt: skip


def model():
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(
        vocab_size=64, num_key_value_heads=2, tie_word_embeddings=False, **sizes
    )
    return LlamaForCausalLM(config)


def trl_trainer(train_dataset, **options):
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", eos_token="w1"
    )
    data = Dataset.from_dict(
        {"input_ids": [row["input_ids"].tolist() for row in train_dataset]}
    )
    return trl.SFTTrainer(train_dataset=data, processing_class=tokenizer, **options)


def made(out, batches, callbacks, steps=8, by_trl=False, evaluated=None, **options):
    data = [{"input_ids": x, "labels": x} for x in batches.view(-1, 32)]
    trainer, arguments = (
        (trl_trainer, trl.SFTConfig) if by_trl else (Trainer, TrainingArguments)
    )
    return trainer(
        model=model(), train_dataset=data, eval_dataset=evaluated and data[:evaluated], callbacks=callbacks,
        args=arguments(output_dir=str(out), max_steps=steps, **ARGUMENTS, **options),
    )  # fmt: skip


def trained(out, batches, resume=None, recipe=NOISY, callback=None, **options):
    callback = callback or AblateCallback(recipe, seed=3)
    trainer = made(out, batches, [callback], **options)
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return callback, {
        row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row
    }


@pytest.fixture(scope="module", params=[False, True], ids=["Trainer", "TRL"])
def whole(tmp_path_factory, request, batches):
    out, by_trl = tmp_path_factory.mktemp("hf"), request.param
    train = functools.partial(trained, batches=batches, by_trl=by_trl)
    return out, train, *train(out)


def test_optimizer_steps_are_counted_and_a_resume_is_equal_to_the_bit(whole, tmp_path):
    out, train, callback, losses = whole
    again, resumed = train(tmp_path, resume=out / "checkpoint-3")
    assert resumed == losses
    assert again.stepper.state.step == callback.stepper.state.step == len(losses) == 8


def test_a_resume_without_the_state_raises(whole, tmp_path):
    out, train, *_ = whole
    place = out / "checkpoint-6/trainer_state.json"
    content = json.loads(place.read_text())
    stored = content["stateful_callbacks"].pop("AblateCallback")
    of_two_callbacks = content | {
        "stateful_callbacks": {"AblateCallback": [stored] * 2}
    }
    for without in (content, of_two_callbacks):
        place.write_text(json.dumps(without))
        with pytest.raises(
            RuntimeError, match="goes on after step 6, the recipe's state after 0"
        ):
            train(tmp_path, resume=out / "checkpoint-6")


def test_reset_weights_resume_to_the_bit(tmp_path, batches):
    recipe = {"preset": "primus-turbo", "deoscillate": {"window": 2, "threshold": 2.0}}
    _, losses = trained(tmp_path / "a", batches, recipe=recipe)
    _, resumed = trained(
        tmp_path / "a", batches, recipe=recipe, resume=tmp_path / "a/checkpoint-3"
    )
    assert resumed == losses
    (tmp_path / "a/checkpoint-6/ablate_state.pt").unlink()
    with pytest.raises(RuntimeError, match="resume in its folder"):
        trained(
            tmp_path / "a", batches, recipe=recipe, resume=tmp_path / "a/checkpoint-6"
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("by_trl", [False, True])
def test_compiled_and_in_bf16(tmp_path, batches, by_trl):
    options = {
        "bf16": True,
        "torch_compile": True,
        "torch_compile_backend": "aot_eager",
    }
    callback, losses = trained(tmp_path, batches, steps=2, by_trl=by_trl, **options)
    assert callback.stepper.state.step == 2
    assert all(loss < 5 for loss in losses.values())


def test_in_a_study_it_passes_rows_and_saves_when_asked_to_stop(in_study, batches):
    class Asked(AblateCallback):
        def on_optimizer_step(self, *args, **rest):
            super().on_optimizer_step(*args, **rest)
            self.stepper.should_stop = self.stepper.state.step == 2

    evaluate = {"evaluated": 4, "eval_strategy": "steps", "eval_steps": 1}
    _, losses = trained(in_study / "out", batches, callback=Asked(), **evaluate)
    assert (in_study / "out/checkpoint-2/trainer_state.json").exists()
    rows = rows_of(in_study)
    assert [(row["step"], *(row.keys() & {"loss", "val_loss"})) for row in rows] == [
        (1, "loss"), (1, "val_loss"), (2, "loss"), (2, "val_loss"),
    ]  # fmt: skip
    assert rows[0]["loss"] == losses[1]


def test_a_callback_that_came_too_late_says_so(tmp_path, batches):
    trainer = made(tmp_path, batches, [], steps=1)
    trainer.add_callback(AblateCallback(NOISY))
    with pytest.raises(RuntimeError, match="was not there when the Trainer was made"):
        trainer.train()
