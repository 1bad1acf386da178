"""An attempt that a trainer in this process trains: the device, the checkpoint, the files of rows, the call.

It loads torch, so the worker imports it only where it trains.
"""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING, Any

import torch

from ablate.backends.select import fit_choices, run_self_tests
from ablate.base.files import restrict_umask, write_record
from ablate.data import load, open_tokens
from ablate.execute import own_trainer
from ablate.execute.environment import describe_environment, fingerprint
from ablate.execute.orphans import end_with_this_process
from ablate.execute.side_tasks import Keeper
from ablate.plan.shares import CONTEXT_BYTES
from ablate.store.checkpoints import load_newest, load_step
from ablate.store.metrics import MetricsWriter
from ablate.train import train
from ablate.train.group import ALONE, Layout
from ablate.train.routes import record, replay
from ablate.train.snapshot import save_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from ablate.diagnose.recorder import Recorder
    from ablate.execute.pending_runs import RunRequest
    from ablate.execute.side_tasks import Watch
    from ablate.store.checkpoints import Checkpoint
    from ablate.store.leases import Leases
    from ablate.train import TrainResult
    from ablate.train.group import Group
    from ablate.train.step import Trainee


def train_here(
    task: RunRequest,
    lease: Leases,
    watch: Watch,
    should_stop: Callable[[], bool],
    begin: Callable[[int], Group] | None,
) -> tuple[TrainResult, dict[str, str]]:
    """Train from the last good checkpoint; return the end, and the hashes of the run's files of rows."""
    run = task.folder
    resources = task.resources
    torch.set_num_threads(resources.cpus)
    if task.device == "cuda":
        _hold_to_share(resources.num_gpus)
    choices = fit_choices(task.config, resources, task.device)
    tests = run_self_tests(
        task.config, task.device, allow_failed=resources.allow_failed_self_test
    )
    start, fingerprints = _resume(task, lease)
    environment = describe_environment(
        choices, tests, task.device, task.git_commit,
        fingerprints=fingerprints, world_size=resources.devices_per_run,
    )  # fmt: skip
    if task.config.trainer is task.trainer is None:
        environment["step_eager_because"] = None
    write_record(run.environment_path, environment)

    def on_eager(reason: str) -> None:
        print(f"step: eager, because {reason}", flush=True)
        write_record(run.environment_path, environment | {"step_eager_because": reason})

    paths = [run.metrics_path]
    if task.diagnostics is not None:
        paths.append(run.diagnostics_path)
    if task.records:
        paths.append(run.routes_path)
    rows = {} if start is None else start.rows
    step = 0 if start is None else start.step
    with contextlib.ExitStack() as files:
        writers = {
            path: files.enter_context(MetricsWriter(path, rows.get(path.name, 0)))
            for path in paths
        }

        def observe(trainee: Trainee) -> Recorder | None:
            _route(task, trainee, writers)
            if task.diagnostics is None:
                return None
            from ablate.diagnose.recorder import Recorder

            return Recorder(
                trainee, task.diagnostics, watch.writing(writers[run.diagnostics_path])
            )

        group = ALONE if begin is None else begin(step)
        result = _call_trainer(
            task,
            _keeper(task, group, start, [*writers.values()], lease, fingerprints),
            watch.writing(writers[run.metrics_path]),
            should_stop,
            observe,
            on_eager,
        )
        hashes = {writer.name: writer.sync()[1] for writer in writers.values()}
    return result, hashes


def _hold_to_share(gpus: float) -> None:
    """Let this process take no more of its GPU's memory than its run's share, so that others keep theirs.

    A process that has trained another run before gives back what that left.
    """
    gc.collect()
    torch.cuda.empty_cache()
    if gpus < 1:
        gpus -= CONTEXT_BYTES / torch.cuda.get_device_properties("cuda").total_memory
    torch.cuda.set_per_process_memory_fraction(min(max(gpus, 0.0), 1.0), 0)


def _resume(task: RunRequest, lease: Leases) -> tuple[Checkpoint | None, list[str]]:
    """Load the checkpoint to go on from; return also the fingerprints of all attempts, this one's last."""
    start, lines = load_newest(task.folder.checkpoints, task.prefix)
    for line in lines:
        print(line, flush=True)
    here = fingerprint(task.device, task.resources.cpus)
    if start is None:
        lease.note(fingerprint=here, resumed_from_step=0)
        return None, [here]
    lease.note(fingerprint=here, resumed_from_step=start.step)
    print(f"going on from the checkpoint after step {start.step}", flush=True)
    others = [earlier for earlier in start.fingerprints if earlier != here]
    if others:
        before = ", ".join(start.fingerprints)
        print(
            f"steps before it were trained by other arithmetic: {before}; here it is {here}"
        )
    return start, [*others, here]


def follow(task: RunRequest, group: Group, step: int) -> None:
    """Train beside the process that executes the run, from its checkpoint after ``step``.

    Raises:
        Exception: any exception of the trainer; the process that started this one ends the others.
    """
    restrict_umask(task.folder.path)
    end_with_this_process()
    torch.set_num_threads(task.resources.cpus)
    start = load_step(task.folder.checkpoints, step) if step else None
    _call_trainer(
        task,
        _keeper(task, group, start),
        on_metrics=lambda _: None,
        should_stop=lambda: False,
        observe=lambda trainee: _route(task, trainee, {}),
        on_eager=lambda _: None,
    )


def _keeper(
    task: RunRequest,
    group: Group,
    start: Checkpoint | None,
    rows: Sequence[MetricsWriter] = (),
    lease: Leases | None = None,
    fingerprints: Sequence[str] = (),
) -> Keeper:
    return Keeper(
        task.folder.checkpoints,
        rows,
        start,
        lease,
        group=group,
        fingerprints=fingerprints,
        every_sec=task.resources.checkpoint_every_sec,
        prefixes=task.prefixes,
    )


def _route(
    task: RunRequest, trainee: Trainee, writers: Mapping[Path, MetricsWriter]
) -> None:
    """Let a mixture's tokens take the routes of another run, or record their own."""
    if (original := task.config.original) is not None:
        replay(trainee, task.folder_of(original).routes_path)
    elif task.records:
        record(trainee, writers[task.folder.routes_path].append)


def _call_trainer(
    task: RunRequest,
    keeper: Keeper,
    on_metrics: Callable[[dict[str, Any]], None],
    should_stop: Callable[[], bool],
    observe: Callable[[Trainee], Recorder | None],
    on_eager: Callable[[str], None],
) -> TrainResult:
    """Call the user's trainer, or ours; only ours takes a layout and an observer."""
    options: dict[str, Any] = {
        "on_metrics": on_metrics,
        "tokens": open_tokens(load(task.tokens_dir)) if task.tokens_dir else None,
        "should_stop": should_stop,
        "checkpoints": keeper,
        "device": task.device,
    }
    name = task.config.trainer or task.trainer
    if name is None:
        layout = Layout(
            group=keeper.group,
            checkpoint_activations=task.resources.activation_checkpointing,
            on_eager=on_eager,
        )
        result = train(task.config, layout=layout, observe=observe, **options)
    else:
        assert isinstance(name, str)
        result = own_trainer.call(
            name, task.config, follows=keeper.lease is None, **options
        )
    if task.keep_weights and result.trainee is not None and keeper.is_mine():
        save_weights(
            result.trainee.module, keeper.group, task.config, task.folder.weights,
            tokenizer=task.tokens_dir,
        )  # fmt: skip
    return result
