"""The study of four runs that these tests execute, for processes of their own as well."""

from ablate.execute.pending_runs import RunRequest
from ablate.recipes import Recipe
from ablate.run.config import (
    DataConfig,
    ModelConfig,
    ResourcesConfig,
    RunConfig,
    TrainingConfig,
)
from ablate.store import StudyStore
from ablate.store.plan_file import LockedArm, LockedPlan, LockedRun, Target


def write_plan(store, name, run_ids, tokens):
    """Write a plan of one arm, with a seed for each run."""
    runs = tuple(LockedRun(id=run_id, seed=seed) for seed, run_id in enumerate(run_ids))
    arms = (LockedArm(name="bf16", recipe="bf16", tokens=tokens, runs=runs),)
    target = Target(kind="val_loss", value=2.0)
    store.write_plan(LockedPlan(study=name, baseline="bf16", target=target, arms=arms))


def config_of(training, **settings):
    """A run's configuration in bf16, of a model and of data that do not matter."""
    defaults = {
        "model": ModelConfig(), "data": DataConfig(), "data_digest": "x", "vocab_size": 256,
        "recipe": Recipe(), "backend": "emulated", "seed": 1,
    }  # fmt: skip
    return RunConfig(training=training, **defaults | settings)


def requests_of(folder, trainer=None):
    """Return a store with a plan of one arm and four seeds, and the requests to run them."""
    store = StudyStore(folder)
    requests = [
        RunRequest(
            run_id=f"{seed:016x}",
            tokens_dir=None,
            resources=ResourcesConfig(),
            trainer=trainer,
            config=config_of(TrainingConfig(tokens=30), seed=seed, vocab_size=64),
        )
        for seed in range(4)
    ]
    write_plan(store, "s", [request.run_id for request in requests], 30)
    return store, requests
