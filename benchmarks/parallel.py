"""Two runs side by side on two cores over the same two one after the other: the ratio of their throughputs.

    python benchmarks/parallel.py --tokens 300000

Each run has one core, real training on the embedded corpus, in Ray workers as in any study. Time counts from
the first run's start to the last one's end, in workers that have had a run before: a study reuses them, so
that what Ray and the imports take is paid once a study.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import ray

from ablate.base.files import cache_folder
from ablate.data import prepare
from ablate.execute.driver import execute_study
from ablate.execute.pending_runs import RunRequest
from ablate.recipes import RecipeSpec, resolve
from ablate.run.config import (
    DataConfig,
    ModelConfig,
    ResourcesConfig,
    RunConfig,
    TrainingConfig,
)
from ablate.store import StudyStore


def two_runs(tokens: int, first_seed: int) -> list[RunRequest]:
    files = prepare(DataConfig(), cache_folder("tokens"))
    requests = []
    for seed in range(first_seed, first_seed + 2):
        config = RunConfig(
            model=ModelConfig(layers=2),
            data=DataConfig(),
            data_digest=files.digest,
            vocab_size=256,
            training=TrainingConfig(
                tokens=tokens,
                batch_size=16,
                eval_every_tokens=tokens,
                eval_tokens=16_384,
            ),
            recipe=resolve(RecipeSpec(gemms=["fprop", "dgrad", "wgrad"])),
            backend="emulated",
            seed=seed,
        )
        requests.append(
            RunRequest(
                run_id=f"{seed:016x}",
                config=config,
                tokens_dir=files.folder,
                resources=ResourcesConfig(),
            )
        )
    return requests


def tokens_per_sec(cores: int, tokens: int) -> float:
    requests = two_runs(tokens, 0)
    with tempfile.TemporaryDirectory() as folder:
        store = StudyStore(Path(folder) / "parallel")
        ray.init(
            address="local",
            num_cpus=cores,
            include_dashboard=False,
            log_to_driver=False,
        )
        try:
            execute_study(store, two_runs(tokens // 20, 2))
            execute_study(store, requests)
        finally:
            ray.shutdown()
        ends = [store.run(request.run_id).status() for request in requests]
        assert all(end.state == "finished" for end in ends), ends
        seconds = max(end.ended_unix or 0 for end in ends) - min(
            end.started_unix or 0 for end in ends
        )
        return sum(end.tokens for end in ends) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=300_000)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    ratios = []
    for _ in range(args.repeats):
        alone = tokens_per_sec(1, args.tokens)
        together = tokens_per_sec(2, args.tokens)
        ratios.append(together / alone)
        print(
            f"one after the other {alone:8.0f} tokens/s, side by side {together:8.0f}: {ratios[-1]:.2f} x"
        )
    print(f"median {statistics.median(ratios):.2f} x")


if __name__ == "__main__":
    main()
