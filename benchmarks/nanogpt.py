"""Our bf16 training step against nanoGPT's: as many parameters, the same cores, one process.

nanoGPT (github.com/karpathy/nanoGPT) is fetched apart: ``--peer`` is the path of its ``model.py``. On a CPU
its ``train.py`` computes in fp32 and is run with ``--compile=False``, as its README says; bf16 autocast is
timed too.

    python benchmarks/nanogpt.py --peer ../nanoGPT/model.py
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from machine import prepare

from ablate.recipes import RecipeSpec, resolve
from ablate.run.config import DataConfig, ModelConfig, RunConfig, TrainingConfig
from ablate.train.step import assemble, gradients

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", type=Path, required=True, help="nanoGPT's model.py")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    print(prepare(args.threads))
    window = np.random.default_rng(0).integers(
        0, VOCABULARY, (args.batch_size, args.seq_len + 1)
    )
    llama = ModelConfig(
        width=args.width,
        layers=args.layers,
        heads=args.width // 64,
        ffn=round(args.width * 8 / 3 / 32) * 32,
    )
    gpt = ModelConfig(
        architecture="gpt",
        width=args.width,
        layers=args.layers,
        heads=args.width // 64,
        ffn=4 * args.width,
    )
    peer = load(args.peer)
    bf16 = torch.autocast("cpu", dtype=torch.bfloat16)
    steps = {
        "ours, llama": ours(llama, args, window),
        "ours, gpt": ours(gpt, args, window),
        "nanoGPT, fp32": theirs(peer, args, window, contextlib.nullcontext()),
        "nanoGPT, bf16 autocast": theirs(peer, args, window, bf16),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(args.repeats + 1):
        for name, (step, _) in steps.items():
            start = time.perf_counter()
            step()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    tokens = args.batch_size * args.seq_len
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    for name, (_, parameters) in steps.items():
        ratio = medians[name] / medians["ours, llama"]
        print(
            f"{name:<24} {parameters / 1e6:6.2f} M parameters {tokens / medians[name]:8,.0f} tokens/s   "
            f"{ratio:.2f} × the time of ours, llama"
        )


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    if spec is None or spec.loader is None:
        sys.exit(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module
    spec.loader.exec_module(module)
    return module


def ours(
    model: ModelConfig, args: argparse.Namespace, window: np.ndarray[Any, Any]
) -> tuple[Callable[[], None], int]:
    training = TrainingConfig(seq_len=args.seq_len, batch_size=args.batch_size)
    config = RunConfig(
        model=model, data=DataConfig(), data_digest="made up", vocab_size=VOCABULARY, training=training,
        recipe=resolve(RecipeSpec()), backend="emulated", seed=0,
    )  # fmt: skip
    trainee = assemble(config, "cpu")

    def step() -> None:
        gradients(trainee, window, 1.0)
        trainee.optimizer.step()
        trainee.optimizer.zero_grad(set_to_none=True)

    return step, sum(parameter.numel() for parameter in trainee.module.parameters())


def theirs(
    peer: Any,
    args: argparse.Namespace,
    window: np.ndarray[Any, Any],
    context: contextlib.AbstractContextManager[Any],
) -> tuple[Callable[[], None], int]:
    config = peer.GPTConfig(
        block_size=args.seq_len, vocab_size=VOCABULARY, n_layer=args.layers, n_head=args.width // 64,
        n_embd=args.width, dropout=0.0, bias=False,
    )  # fmt: skip
    model = peer.GPT(config)
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), "cpu")
    tokens = torch.from_numpy(window)

    def step() -> None:
        with context:
            _, loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    main()
