"""A script with Hugging Face's Trainer, as it might be yours; lines that end in "# ablate" are the change.

Alone it trains in fp32: ``python train.py --seed 0 --steps 100 --out FOLDER``. A study starts it for each arm
and seed, and gives recipe and seed by the environment.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--out", type=Path, required=True)
options = parser.parse_args()

# The text of Python's own library, as bytes; the last files are the evaluation set.
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = b"".join(path.read_bytes() for path in files)[: 1 << 22]
tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(-1, 128)
rows = [{"input_ids": row, "labels": row} for row in tokens]

torch.manual_seed(options.seed)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=False,
    )
)  # fmt: skip
callbacks = []
if "ABLATE_RECIPE" in os.environ:  # ablate
    from ablate.integrations.hf import AblateCallback  # ablate

    callbacks = [AblateCallback()]  # ablate
options.out.mkdir(parents=True, exist_ok=True)
trainer = Trainer(
    model=model, train_dataset=rows[:-64], eval_dataset=rows[-64:], callbacks=callbacks,
    args=TrainingArguments(
        output_dir=str(options.out), seed=options.seed, max_steps=options.steps, per_device_train_batch_size=16,
        per_device_eval_batch_size=64, learning_rate=3e-3, lr_scheduler_type="constant", logging_steps=10,
        eval_strategy="steps", eval_steps=10, save_steps=50, save_total_limit=1, report_to=[],
        disable_tqdm=True,
    ),
)  # fmt: skip
# None begins anew
trainer.train(resume_from_checkpoint=get_last_checkpoint(str(options.out)))
