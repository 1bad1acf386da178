"""A command as a run's trainer: an attempt is started, followed by its log, and ended with all it started.

The worker never touches the device: the command owns it. The command keeps its own checkpoints. On a machine
that was lost the next attempt cannot end what is left there: it waits as long as a worker there may take to
notice and to end its command.

How it fails: an exit code of 0 is no success without rows up to the end of the plan. A command that got
further than the attempts before it is tried again; one that did not has failed, with its last lines.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate.base.clock import running_clock
from ablate.base.errors import UserError, first_line, safe_text
from ablate.base.files import restrict_umask, write_record
from ablate.execute.command_follower import LOOK_SEC, Follower
from ablate.execute.command_process import Launch
from ablate.execute.environment import describe_command, read_otherwise
from ablate.execute.orphans import end_with_this_process
from ablate.run.command import Command, reading_of, shell_line
from ablate.run.log_text import NewText
from ablate.run.schedule import plan_steps
from ablate.store.leases import STALE_SEC, Leases
from ablate.store.metrics import MetricsWriter, new_lines, parse_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ablate.execute.pending_runs import RunRequest
    from ablate.execute.side_tasks import Watch
    from ablate.run.config import RunConfig
    from ablate.store import RunDir


def run_values(config: RunConfig, **place: Any) -> dict[str, Any]:
    """Return what the templates become in one attempt of a run.

    ``place``: ``run_dir`` and ``num_devices``, and what of the rest is not that of a first attempt alone.
    """
    plan = plan_steps(config.training)
    return {
        "python": sys.executable, "seed": config.seed, "steps": plan.steps, "tokens": plan.tokens,
        "attempt": 1, "devices": "", "port": 0, "node_rank": 0, "num_nodes": 1, "master_addr": "127.0.0.1",
        **place,
    }  # fmt: skip


def train_by_command(
    task: RunRequest,
    lease: Leases,
    watch: Watch,
    should_stop: Callable[[], bool],
) -> tuple[Follower, dict[str, str]]:
    """Train a run by its command, in its folder; return how it ended, and the hashes of its files of rows.

    Where its logs were read in another way before, they are read again, and the command's end is judged anew;
    nothing is started in this attempt.

    On several nodes this process follows the command on the first; ``start_on_node`` runs on the others.

    Raises:
        UserError: the command cannot be started as the study has it; see ``Follower.follow``.
    """
    run = task.folder
    command = task.config.trainer
    assert isinstance(command, Command)
    attempt = lease.record.attempt
    num_nodes = task.resources.nodes
    gpus = int(task.resources.num_gpus)
    num_devices = gpus or 1
    _wait_for_lost_attempt(task, lease, command.grace_sec, watch, should_stop)
    values = run_values(
        task.config, run_dir=run.path.resolve(), attempt=attempt, num_devices=num_devices, port=_free_port(),
        num_nodes=num_nodes, master_addr=_own_address(),
    )  # fmt: skip
    resumed_differently = run.recorded().get("resumed_differently", [])
    environment = former = read_otherwise(run, command)
    if former:
        run.metrics_path.unlink(missing_ok=True)
        run.attempt_log(attempt - 1).with_suffix(".read").unlink(missing_ok=True)
    else:
        environment = describe_command(
            command, task.git_commit, num_devices * num_nodes, gpus=gpus
        )
        environment["command"] = shell_line(command, task.config.recipe, values)
    environment["reading"] = reading_of(command)
    environment["resumed_differently"] = resumed_differently
    lines, num_bytes = new_lines(run.metrics_path)
    study = run.path.parent.parent.name
    launch = Launch(
        config=task.config, values=values, secrets=task.secrets, group=study
    )
    logs = [
        [run.attempt_log(number, rank) for rank in range(num_nodes)]
        for number in range(1, attempt + 1)
    ]
    with MetricsWriter(run.metrics_path, num_bytes) as writer:
        on_row = watch.writing(writer)
        follower = Follower(launch, logs, parse_rows(lines), on_row, watch.progress)
        if former:
            follower.follow_again(former.get("exit_code"))
        else:
            write_record(run.environment_path, environment)
            with _other_nodes(task, launch) as nodes_fault:
                follower.follow(should_stop, nodes_fault)
        hashes = {writer.name: writer.sync()[1]}
    different = {*resumed_differently, *follower.rows.different}
    environment |= {
        "exit_code": follower.exit_code, "markers": [*follower.seen.values()],
        "resumed_differently": sorted(different), "log_notes": [*follower.notes()],
    }  # fmt: skip
    write_record(run.environment_path, environment)
    return follower, hashes


def _wait_for_lost_attempt(
    task: RunRequest,
    lease: Leases,
    grace_sec: float,
    watch: Watch,
    should_stop: Callable[[], bool],
) -> None:
    """Wait until what the attempt before has started elsewhere has ended, if that attempt was lost."""
    former = lease.read(lease.record.attempt - 1)
    if former is None or former.outcome is not None:
        return
    if task.resources.nodes == 1 and former.machine == lease.record.machine:
        return  # whatever it has left here is found
    wait_sec = grace_sec + STALE_SEC  # storage may show our claim late
    print(
        f"attempt {former.attempt} on {former.host} was lost: waiting {wait_sec:.0f} s, in which what "
        "it has started there ends",
        flush=True,
    )
    clock = running_clock()
    while clock() < wait_sec and not should_stop():
        watch.progress()
        time.sleep(LOOK_SEC)


@contextlib.contextmanager
def _other_nodes(
    task: RunRequest, launch: Launch
) -> Iterator[Callable[[], str | None]]:
    """Run the command on the other nodes for the block; yields a function that tells a node's fault."""
    resources = task.resources
    if resources.nodes == 1:
        yield lambda: None
        return
    import ray
    from ray.util import get_current_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    attempt = launch.values["attempt"]
    nodes = []
    for rank in range(1, resources.nodes):
        remote = ray.remote(max_retries=0, max_calls=1)(start_on_node).options(
            num_cpus=resources.cpus, num_gpus=resources.num_gpus, resources=resources.custom or None,
            scheduling_strategy=PlacementGroupSchedulingStrategy(get_current_placement_group(), rank),
        )  # fmt: skip
        nodes.append(remote.remote(launch, task.folder, attempt, rank))

    def fault() -> str | None:
        for rank, node in enumerate(nodes, 1):
            if not ray.wait([node], timeout=0)[0]:
                continue
            try:
                code = ray.get(node)
            except ray.exceptions.RayError as error:
                return f"node {rank} of the command is gone: {first_line(error)}"
            if code:
                return f"the command on node {rank} ended with exit code {code}"
        return None

    try:
        yield fault
    finally:
        _over_path(task.folder, attempt).touch()
        ray.wait(nodes, num_returns=len(nodes), timeout=launch.command.grace_sec + 30)


def _over_path(run: RunDir, attempt: int) -> Path:
    """Return the file that tells the other nodes that the attempt is over."""
    return run.attempts / f"{attempt}.over"


def start_on_node(launch: Launch, run: RunDir, attempt: int, rank: int) -> int:
    """Run the command on one more node until it ends, or the attempt is over; return its exit code."""
    restrict_umask(run.path)
    end_with_this_process()
    leases = Leases(run.attempts)
    with launch.started(run.attempt_log(attempt, rank), rank) as family:
        while (code := family.poll()) is None:
            is_over = _over_path(run, attempt).exists()
            if is_over or leases.latest() != attempt or not leases.is_held():
                return 0
            time.sleep(LOOK_SEC)
        return code


def _own_address() -> str:
    """Return this machine's address, for the other nodes."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return "127.0.0.1"
    return str(ray.util.get_node_ip_address())


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def dry_run(arm: str, config: RunConfig, num_devices: int) -> dict[str, str]:
    """Start an arm's command with ``dry_run_args`` in a folder of its own, and wait for its end.

    Raises:
        UserError: nothing says how it ends after one step, or it fails.
    """
    command = config.trainer
    assert isinstance(command, Command)
    if not command.dry_run_args:
        raise UserError(
            f"--dry-run: nothing says how the command of arm '{arm}' ends after one step",
            hint="such as trainer.dry_run_args: [--train-iters, '1']",
        )
    words = [*command.command, *command.dry_run_args]
    with tempfile.TemporaryDirectory() as folder:
        launch = Launch(
            config=replace(config, trainer=replace(command, command=words)),
            values=run_values(
                config, run_dir=Path(folder), num_devices=num_devices, port=_free_port()
            ),
            secrets={},  # they are in this process's environment
            group="dry run",
        )
        log = Path(folder) / "log"
        with launch.started(log) as family:
            code = family.process.wait()
        last_line = "none"
        for line in NewText(log).new(ended=True):
            if line:
                last_line = safe_text(line)[:200]
    if code:
        raise UserError(
            f"--dry-run: the command of arm '{arm}' ended with exit code {code}; its last line: {last_line}"
        )
    return {"last_line": last_line}
