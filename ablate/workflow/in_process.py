"""``run_in_process``: one run of a study in this process, without Ray, for a debugger. It stores no result.

How it fails: ``UserError`` for a run that cannot be one process; an exception of the user's model or trainer
is not caught.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ablate.base.errors import UserError
from ablate.plan import build_plan, known_plan
from ablate.run.command import Command
from ablate.store import StudyStore
from ablate.workflow.run import choose_runs, load_known

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from ablate.plan import PlannedArm
    from ablate.store.checkpoints import Snapshot
    from ablate.train import TrainResult
    from ablate.workflow import Listener, Where


def run_in_process(
    study: str,
    where: Where,
    listener: Listener,
    *,
    only: Collection[str],
    seeds: Collection[int] | None,
    settings: Sequence[str],
) -> TrainResult:
    """Train the one run that ``only`` and ``seeds`` choose; tell the listener each row of its metrics.

    Raises:
        UserError: another number of runs, a command, several devices, or as ``run_study``.
        Exception: whatever the model or the trainer raises.
    """
    loaded = load_known(study, where, settings)
    plan = known_plan(build_plan(loaded), StudyStore(where.storage / loaded.name))
    chosen = choose_runs(plan, only, seeds)
    if len(chosen) != 1:
        raise UserError(
            f"--in-process: expected one run, not {len(chosen)}",
            hint="--only ARM --seeds 0",
        )
    ((arm, run),) = [pair for pair in plan.runs() if pair[1].id in chosen]
    if isinstance(arm.config.trainer, Command):
        raise UserError(
            f"--in-process: arm '{arm.name}' trains by a command, which is another process"
        )
    if arm.resources.devices_per_run > 1:
        num_devices = arm.resources.devices_per_run
        raise UserError(
            f"--in-process: arm '{arm.name}' trains on {num_devices} devices, one process each"
        )
    return _train(arm, run.seed, where, listener)


def _train(arm: PlannedArm, seed: int, where: Where, listener: Listener) -> TrainResult:
    import torch

    from ablate.data import open_tokens
    from ablate.execute import own_trainer
    from ablate.train import train
    from ablate.workflow.prepare import prepare

    corpora = prepare(where, [arm], [arm], listener)
    torch.set_num_threads(arm.resources.cpus)  # as a worker's, for the same bits

    def say_row(row: dict[str, Any]) -> None:
        name = "val_loss" if row["kind"] == "eval" else "loss"
        if name in row:
            listener.say(
                f"step {row['step']}, {row['tokens']:,} tokens: {name} {row[name]:.4f}"
            )

    config = arm.config.with_seed(seed)
    trainer: Callable[..., TrainResult] = train
    if isinstance(config.trainer, str):
        trainer = partial(own_trainer.call, config.trainer)
    return trainer(
        config,
        say_row,
        tokens=open_tokens(corpora[config.data_digest]),
        device="cuda" if arm.resources.num_gpus else "cpu",
        checkpoints=_NoCheckpoints(),
        should_stop=lambda: False,
    )


class _NoCheckpoints:
    """Keeps nothing (``ablate.train.snapshot.Checkpoints``)."""

    def load(self) -> None:
        return None

    def due(self, tokens: int) -> bool:  # noqa: ARG002
        return False

    def save(self, snapshot: Snapshot) -> None:
        pass
