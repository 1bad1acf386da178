"""A command as a run's trainer: started, followed by its log (``command_log``), ended with all it started.

The worker never touches the device: the command owns it. The command keeps its own checkpoints.

Every process that the command starts inherits ``ABLATE_COMMAND`` and is found by it, in whatever session; a
daemon that clears its environment is found by its parent, while the worker lives (``family``). ``orphans``
ends them with the worker; the next attempt ends what is left before it begins. On a machine that was lost it
cannot: it waits as long as a worker there may take to notice and to end its command.

How it fails: an exit code of 0 is no success without rows up to the end of the plan. A command that got
further than the attempts before it is tried again; one that did not has failed, with its last lines.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

from ablate.base.clock import running_clock
from ablate.base.errors import UserError, first_line, safe_text
from ablate.base.files import open_unlinked, read_record, restrict_umask, write_record
from ablate.execute.command_log import Rows
from ablate.execute.environment import describe_command
from ablate.execute.family import Family, watched
from ablate.execute.orphans import end_with_this_process, marked
from ablate.integrations import applied_line
from ablate.run.command import (
    Command,
    check_inherited,
    filled,
    variables_of,
)
from ablate.run.log_formats import DIVERGED
from ablate.run.log_rows import LogReader
from ablate.run.log_text import NewFiles, NewText, leave_out
from ablate.run.schedule import plan_steps
from ablate.store.leases import STALE_SEC, Leases
from ablate.store.metrics import MetricsWriter, new_lines, parse_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ablate.execute.pending_runs import RunRequest
    from ablate.execute.side_tasks import Watch
    from ablate.run.config import RunConfig
    from ablate.store import RunDir

MARK = "ABLATE_COMMAND"
LOOK_SEC = 0.2
_BLOCK = 1 << 12
"""Parts of files are left out in units of so many bytes."""
_LOOKS_LIKE_EVALUATION = re.compile(
    r"(?:val|Val|VAL)\w*[^\w\n]+(?:\w+[^\w\n]+){0,4}?(?i:loss|ppl|bpb|perplexity)\b.*\d"
)


@dataclass(frozen=True, kw_only=True)
class CommandEnd:
    """How an attempt of a command ended. ``transient``: another attempt may get further.

    ``seen``: what of its output the expected markers matched; ``resumed_differently``: steps whose rows
    differ from those of an earlier attempt; ``notes``: how its log was read, where that is not plain.
    """

    state: Literal["finished", "diverged", "interrupted", "failed"]
    step: int
    tokens: int
    message: str | None = None
    transient: bool = False
    seen: tuple[str, ...] = ()
    resumed_differently: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


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
    task: RunRequest, lease: Leases, *, watch: Watch, should_stop: Callable[[], bool]
) -> tuple[CommandEnd, dict[str, str]]:
    """Train a run by its command, in its folder; return its end, and the hashes of its files of rows.

    On several nodes this process follows the command on the first; ``start_on_node`` runs on the others.

    Raises:
        UserError: the command cannot be started as the study has it; see ``run_command``.
    """
    run, command, attempt = task.folder, task.config.trainer, lease.record.attempt
    assert isinstance(command, Command)
    nodes, gpus = task.resources.nodes, int(task.resources.num_gpus)
    former = lease.read(attempt - 1)
    if former and former.outcome is None and (nodes > 1 or former.machine != lease.record.machine):
        wait_sec = command.grace_sec + STALE_SEC  # storage may show our claim late
        print(
            f"attempt {former.attempt} on {former.host} was lost: waiting {wait_sec:.0f} s, in which what "
            "it has started there ends",
            flush=True,
        )
        clock = running_clock()
        while clock() < wait_sec and not should_stop():
            watch.progress()
            time.sleep(LOOK_SEC)
    lines, whole = new_lines(run.metrics_path)
    environment = describe_command(command, task.git_commit, max(1, gpus) * nodes, gpus=gpus)
    different = _resumed_differently(run.environment_path)
    write_record(run.environment_path, environment | {"resumed_differently": different})
    address, port = _free_address()
    values = run_values(
        task.config, run_dir=run.path.resolve(), attempt=attempt, num_devices=max(1, gpus), port=port,
        num_nodes=nodes, master_addr=address,
    )  # fmt: skip
    group = run.path.parent.parent.name
    place = Place(config=task.config, values=values, secrets=task.secrets, group=group)
    over = run.attempts / f"{attempt}.over"
    with MetricsWriter(run.metrics_path, whole) as writer:
        others = _start_others(task, place, attempt)
        try:
            end = run_command(
                place,
                logs=[
                    [run.attempt_log(number, rank) for rank in range(nodes)]
                    for number in range(1, attempt + 1)
                ],
                before=parse_rows(lines),
                on_row=watch.writing(writer),
                alive=watch.progress,
                should_stop=should_stop,
                others_fault=lambda: next(filter(None, (fault() for fault in others)), None),
            )
        finally:
            if others:
                over.touch()
                for wait in others:
                    wait(last=True)
        hashes = {writer.name: writer.sync()[1]}
    told = {
        "markers": end.seen,
        "resumed_differently": sorted({*different, *end.resumed_differently}),
        "log_notes": end.notes,
    }
    write_record(run.environment_path, environment | told)
    return end, hashes


def _resumed_differently(environment: Path) -> list[int]:
    """Return the steps that earlier attempts trained otherwise: their logs are not read again."""
    try:
        return list(read_record(environment).get("resumed_differently", ()))
    except (OSError, ValueError):
        return []


def _start_others(task: RunRequest, place: Place, attempt: int) -> list[Callable[..., str | None]]:
    """Start the command on the other nodes; return for each a function that says why it failed, or None."""
    if task.resources.nodes == 1:
        return []
    import ray
    from ray.util import get_current_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    wanted, found = task.resources, []
    for rank in range(1, wanted.nodes):
        strategy = PlacementGroupSchedulingStrategy(get_current_placement_group(), rank)
        remote = ray.remote(max_retries=0, max_calls=1)(start_on_node).options(
            num_cpus=wanted.cpus, num_gpus=wanted.num_gpus, resources=wanted.custom or None,
            scheduling_strategy=strategy,
        )  # fmt: skip
        there = remote.remote(place, task.folder, attempt, rank)

        def fault(*, last: bool = False, there: Any = there, rank: int = rank) -> str | None:
            done, _ = ray.wait([there], timeout=place.command.grace_sec + 30 if last else 0)
            try:
                code = ray.get(done[0]) if done else 0
            except ray.exceptions.RayError as error:
                return f"node {rank} of the command is gone: {first_line(error)}"
            return f"the command on node {rank} ended with exit code {code}" if code else None

        found.append(fault)
    return found


def start_on_node(place: Place, run: RunDir, attempt: int, rank: int) -> int:
    """Run the command on one more node until it ends, or the attempt is over; return its exit code."""
    restrict_umask(run.path)
    end_with_this_process()
    leases = Leases(run.attempts)
    with place.started(run.attempt_log(attempt, rank), rank) as family:
        while (code := family.poll()) is None:
            is_over = (run.attempts / f"{attempt}.over").exists()
            if is_over or leases.latest() != attempt or not leases.is_held():
                return 0
            time.sleep(LOOK_SEC)
        return code


def _free_address() -> tuple[str, int]:
    """Return this machine's address, for the other nodes, and a port that is free now."""
    ray = sys.modules.get("ray")
    address = ray.util.get_node_ip_address() if ray is not None and ray.is_initialized() else "127.0.0.1"
    with socket.socket() as free:
        free.bind(("", 0))
        return address, free.getsockname()[1]


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a run's command is started with, on any of its nodes. ``group``: the study's name, for W&B."""

    config: RunConfig
    values: Mapping[str, Any]
    secrets: Mapping[str, str] = field(repr=False)
    group: str

    @property
    def command(self) -> Command:
        """The run's command."""
        assert isinstance(self.config.trainer, Command)
        return self.config.trainer

    def mark(self, rank: int) -> str:
        """Return by what the command's processes on a node are found, in ``$ABLATE_COMMAND``."""
        return f"{self.values['run_dir']} {rank}"

    @contextlib.contextmanager
    def started(self, log: Path, rank: int = 0) -> Iterator[Family]:
        """Run the command during the block, at whose end all that it has started ends; as ``start``."""
        with watched(lambda: self.start(log, rank)) as family:
            try:
                yield family
            finally:
                end_all(self.mark(rank), self.command.grace_sec, family)

    def start(self, log: Path, rank: int = 0) -> subprocess.Popen[bytes]:
        """End what an earlier attempt has left here, then start the command; it appends to ``log``.

        Raises:
            UserError: the environment would change its arithmetic, a secret is missing, or there is no such
                program.
        """
        command = self.command
        check_inherited(command, os.environ)
        if missing := [name for name in command.secrets if name not in {**self.secrets, **os.environ}]:
            hint = "set it where `ablate run` starts"
            raise UserError(f"trainer.secrets: {missing[0]} is not set", hint=hint)
        end_all(self.mark(rank), command.grace_sec)
        devices = os.environ.get("CUDA_VISIBLE_DEVICES") or os.environ.get("HIP_VISIBLE_DEVICES") or ""
        values = {**self.values, "node_rank": rank, "devices": devices}
        words = [filled(word, values) for word in command.words]
        environment = {
            **os.environ,
            **self.secrets,
            **variables_of(self.config.recipe, values),
            "WANDB_RUN_ID": Path(str(values["run_dir"])).name,
            "WANDB_RUN_GROUP": self.group,
            "WANDB_RESUME": "allow",
            "MASTER_ADDR": str(values["master_addr"]),
            "MASTER_PORT": str(values["port"]),
            **{name: filled(text, values) for name, text in command.env.items()},
            "ABLATE_RUN_DIR": str(values["run_dir"]),
            MARK: self.mark(rank),
        }
        with open_unlinked(log, "ab") as file:
            try:
                return subprocess.Popen(
                    words, cwd=command.cwd, env=environment, stdin=subprocess.DEVNULL, stdout=file,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                what = f"the command does not start: {words[0]}: {error.strerror or error}"
                raise UserError(what, hint=f"its folder is {command.cwd}") from None


def dry_run(arm: str, config: RunConfig, num_devices: int) -> dict[str, str]:
    """Start an arm's command with ``dry_run_args`` in a folder of its own, and wait for its end.

    Raises:
        UserError: nothing says how it ends after one step, or it fails.
    """
    command = config.trainer
    assert isinstance(command, Command)
    if not command.dry_run_args:
        hint = "such as trainer.dry_run_args: [--train-iters, '1']"
        raise UserError(
            f"--dry-run: nothing says how the command of arm '{arm}' ends after one step", hint=hint
        )
    words = [*command.command, *command.dry_run_args]
    with tempfile.TemporaryDirectory() as folder:
        port = _free_address()[1]
        place = Place(
            config=replace(config, trainer=replace(command, command=words)),
            values=run_values(config, run_dir=Path(folder), num_devices=num_devices, port=port),
            secrets={},  # they are in this process's environment
            group="dry run",
        )
        log = Path(folder) / "log"
        with place.started(log) as family:
            code = family.process.wait()
        lines = [*filter(None, NewText(log).new(ended=True))]
    last = safe_text(lines[-1])[:200] if lines else "none"
    if code:
        raise UserError(
            f"--dry-run: the command of arm '{arm}' ended with exit code {code}; its last line: {last}"
        )
    return {"last_line": last}


def run_command(
    place: Place,
    *,
    logs: Sequence[Sequence[Path]],
    before: Sequence[Mapping[str, Any]],
    on_row: Callable[[dict[str, Any]], None],
    alive: Callable[[], None],
    should_stop: Callable[[], bool],
    others_fault: Callable[[], str | None] = lambda: None,
) -> CommandEnd:
    """Start the run's command here and follow it to its end.

    ``logs``: of each attempt, this one last, what the command prints on each node, this one first.
    ``before``: the rows of earlier attempts. ``alive``: called when a row is read. ``others_fault``: why the
    command has failed on another node, or None.

    Raises:
        UserError: as ``Place.start``, or a row does not fit the plan.
    """
    follower = _Follower(place, logs, before, on_row, alive)
    rows = follower.rows
    follower.look()
    if should_stop():
        return CommandEnd(state="interrupted", step=rows.last, tokens=rows.tokens, message="interrupted")
    others = None
    # At its end also what a launcher has left behind ends.
    with place.started(logs[-1][0]) as family:
        follower.is_started = True
        follower.look()
        while family.poll() is None and not follower.state and others is None:
            is_behind = follower.look()
            if should_stop():
                follower.end("interrupted", "interrupted")
            others = others_fault()
            if not is_behind:
                time.sleep(LOOK_SEC)
    follower.look_to_the_end()
    is_transient = follower.judge(family.process.returncode, others)
    is_finished = follower.state == "finished"
    return CommandEnd(
        state=follower.state or "failed",
        step=max(rows.last, rows.plan.steps) if is_finished else rows.last,
        tokens=max(rows.tokens, rows.plan.tokens) if is_finished else rows.tokens,
        message=follower.why or None,
        transient=is_transient,
        seen=tuple(follower.seen.values()),
        resumed_differently=tuple(rows.different),
        notes=tuple(follower.notes()),
    )


def _known_places(logs: Sequence[Sequence[Path]]) -> dict[str, Any]:
    """Return how far the attempt before has read each log, by its name."""
    if len(logs) < 2:
        return {}
    try:
        return read_record(logs[-2][0].with_suffix(".read"))
    except (OSError, ValueError):  # it was killed, so its logs are read from the start
        return {}


class _Follower:
    """Reads what a command and its earlier attempts say, and notices how the run goes."""

    def __init__(
        self,
        place: Place,
        logs: Sequence[Sequence[Path]],
        before: Sequence[Mapping[str, Any]],
        on_row: Callable[[dict[str, Any]], None],
        alive: Callable[[], None],
    ) -> None:
        command, values = place.command, place.values
        source = command.metrics
        assert source is not None
        self.rows = Rows(place.config, before, on_row, values["num_nodes"] * values["num_devices"])
        self._alive = alive
        self._files = NewFiles(source, str(Path(command.cwd) / filled(source.place or "", values)))
        self._reader_of_files = LogReader(source)
        # What an earlier attempt printed is read, too: its command may print until it is ended.
        self._places_path = logs[-1][0].with_suffix(".read")
        known = _known_places(logs)
        self._outputs = [
            (
                NewText(log, known.get(log.name)),
                None if source.place else LogReader(source),
                number == len(logs),
            )
            for number, nodes_logs in enumerate(logs, 1)
            for log in nodes_logs
        ]
        self._limit = command.log_limit_mb << 20
        self._left_out: dict[Path, int] = {}
        expected = [*command.expect]
        if source.preset == "ablate":  # the adapter says that it has applied the recipe
            expected.append(re.escape(applied_line(place.config.recipe)))
        self._markers = {pattern: re.compile(pattern) for pattern in expected}
        self._refused = [re.compile(pattern) for pattern in command.refuse]
        self._diverged = [re.compile(pattern) for pattern in (*DIVERGED, *command.diverged)]
        self._said_diverged = ""
        self._not_read: tuple[int, str] | None = None
        self._last_lines = deque[str](maxlen=5)
        self.is_started = False
        self.seen: dict[str, str] = {}
        self.why = ""
        self.state: Literal["", "finished", "diverged", "interrupted", "failed"] = ""

    def end(self, state: Literal["finished", "diverged", "interrupted", "failed"], why: str) -> None:
        """Set how the run has ended, unless that is known or it was only asked to stop."""
        if self.state in ("", "interrupted"):
            self.state = state
            self.why = why

    def look_to_the_end(self) -> None:
        """Read all that was written; nothing more is."""
        while self.look(ended=True):
            pass
        self.keep_places()

    def keep_places(self) -> None:
        """Note how far each log was read, so that the next attempt goes on there."""
        places = {output.path.name: output.known for output, _, _ in self._outputs if output.path.exists()}
        write_record(self._places_path, places)

    def look(self, *, ended: bool = False) -> bool:
        """Read what is new; tell whether there is more."""
        for output, reader, is_own in self._outputs:
            for lines in output.new_pieces(ended=ended):
                self._read_all(lines, reader, is_own=is_own)
            if is_own:
                self._keep_within_limit(output)
        for text in self._files.new(ended=ended):
            self._read(text, self._reader_of_files, is_own=self.is_started)
        is_behind = any(output.is_behind for output, _, _ in self._outputs)
        if is_behind:
            self._alive()
            self.keep_places()
        return is_behind

    def _keep_within_limit(self, output: NewText) -> None:
        """Leave out the middle of a log that is too long, as far as it was read."""
        half = self._limit // 2 // _BLOCK * _BLOCK
        end = (output.offset - half) // _BLOCK * _BLOCK
        begin = self._left_out.get(output.path, half)
        if end - begin >= half // 8 and leave_out(output.path, begin, end):
            self._left_out[output.path] = end

    def notes(self) -> Iterator[str]:
        """Yield how the log was read and kept, where that is not plain."""
        if disagreement := self.rows.disagreement():
            yield disagreement
        for path, end in self._left_out.items():
            left_out = end - self._limit // 2 // _BLOCK * _BLOCK
            yield f"{left_out >> 20:,} MiB of its output left out of {path.name} (trainer.log_limit_mb)"

    def _read_all(self, lines: list[str], reader: LogReader | None, *, is_own: bool) -> None:
        """Read lines; many that say nothing, as of a command that floods its log, are looked at as one."""
        text = "\n".join(lines)
        says_something = (reader is not None and reader.may_hold_rows(text)) or self._says_something(text)
        if not says_something:
            lines = lines[-5:]
        for line in lines:
            self._read(line, reader, is_own=is_own)

    def _says_something(self, text: str) -> bool:
        """Tell whether a text of many lines may hold what is looked for beside rows."""
        patterns = [marker for pattern, marker in self._markers.items() if pattern not in self.seen]
        if any(pattern.search(text) for pattern in (*patterns, *self._refused, *self._diverged)):
            return True
        return not self.rows.has_evaluations and "val" in text.lower()

    def _read(self, text: str, reader: LogReader | None, *, is_own: bool) -> None:
        has_row = False
        for row in reader.rows(text) if reader else ():
            has_row = True
            self._alive()
            if self.state in ("", "interrupted") and (fault := self.rows.add(row, is_new=is_own)):
                self.end("diverged", fault)
        if not is_own:
            return
        if text and not has_row and not text.startswith("{"):
            self._last_lines.append(text[:200])
        for pattern, marker in self._markers.items():
            if pattern not in self.seen and (match := marker.search(text)):
                self.seen[pattern] = match[0]
        if any(pattern.search(text) for pattern in self._refused):
            self.end("failed", f"its output says what trainer.refuse names: {safe_text(text)[:200]}")
        if not self._said_diverged and any(pattern.search(text) for pattern in self._diverged):
            self._said_diverged = safe_text(text)[:200]
        if reader is not None and not self.rows.has_evaluations:
            self._notice_evaluation("" if has_row else text)

    def _notice_evaluation(self, text: str) -> None:
        """End a run whose evaluations cannot be read, once it has trained for half an interval more."""
        tokens = self.rows.tokens
        if self._not_read is None:
            if tokens and _LOOKS_LIKE_EVALUATION.search(text):
                self._not_read = tokens, safe_text(text)[:120]
            return
        first, line = self._not_read
        if tokens >= 1.5 * first:
            self.end("failed", f"its evaluations cannot be read (trainer.metrics): '{line}'")

    def judge(self, code: int, others: str | None) -> bool:
        """Say how a command has ended that ended by itself; tell whether another attempt may get further."""
        missing = [pattern for pattern in self._markers if pattern not in self.seen]
        if self.state:
            return False
        if self._said_diverged and code != 0:
            self.end("diverged", f"the command says: {self._said_diverged}")
        elif missing and self.rows.is_new:
            self.end("failed", f"its output never held '{missing[0]}' (trainer.expect)")
        elif code == 0 and self.rows.is_complete and others is None:
            self.end("finished", "")
        else:
            how = (
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            )
            if code == -signal.SIGKILL:
                how += " (as the kernel does where memory is short)"
            why = f"{others or f'the command {how}'} after step {self.rows.last} of {self.rows.plan.steps}"
            why += f"; its last lines: {safe_text(' | '.join(self._last_lines))}" * bool(self._last_lines)
            self.end("interrupted" if self.rows.is_new else "failed", why)
            return self.rows.is_new
        return False


def end_all(mark: str, grace_sec: float, family: Family | None = None) -> None:
    """Ask every process of a command on this node to end, wait, and kill those that have not ended.

    What a process starts after it was asked is its way to end, and is not asked while its parent lives.
    ``family``: the command that this process has started, which has ended when this returns.
    """
    asked: set[int] = set()
    clock = running_clock()
    while True:
        is_over = family is None or family.poll() is not None
        left = set(marked(MARK, mark))
        if family is not None:
            left |= family.pids()
        if is_over and not left:
            return
        late = clock() >= grace_sec
        known = asked.intersection(left)
        for pid in left:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
                one = psutil.Process(pid)
                if late or not {pid, one.ppid()} & known:
                    asked.add(pid)
                    one.send_signal(signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(0.05)
