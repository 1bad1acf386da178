"""Follows a command to its end, by what it and its earlier attempts say: rows, markers, how the run goes.

How it fails: a run whose evaluations cannot be read, or whose output holds what it must not, has failed as
soon as that is known. The middle of a log that is too long is left out of its file. A command that has failed
is named by its error: the last that it prints, not those of a launcher around it, and no warnings.
"""

from __future__ import annotations

import re
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate.base.errors import UserError, safe_text
from ablate.base.files import read_record, write_record
from ablate.execute.command_log import Rows
from ablate.integrations import applied_line
from ablate.run.command import filled
from ablate.run.log_formats import DIVERGED
from ablate.run.log_rows import LogReader
from ablate.run.log_text import NewFiles, NewText, leave_out

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ablate.execute.command_process import Launch
    from ablate.store import State

LOOK_SEC = 0.2
_OPEN = ("running", "interrupted")
"""States in which it may still turn out that the run has ended otherwise."""
_BLOCK = 1 << 12
"""Parts of files are left out in units of so many bytes."""
_KILLED = (-9, -15, 137, 143)
"""Exit codes of SIGKILL and SIGTERM, and of a shell whose command they have ended."""
_ERROR = re.compile(r"(?:\[rank\d+\]: )?[\w.]*(?:Error|Exception|Interrupt|Exit)\b")
_LAUNCHERS = re.compile("ChildFailedError|CalledProcessError")
"""Errors that say only that another process has ended with one."""
_LOOKS_LIKE_EVALUATION = re.compile(
    r"(?:val|Val|VAL)\w*[^\w\n]+(?:\w+[^\w\n]+){0,4}?(?i:loss|ppl|bpb|perplexity)\b.*\d"
)


@dataclass(frozen=True, kw_only=True)
class _Output:
    """What an attempt prints on a node. ``is_new``: this attempt prints it.

    ``reader``: None where rows come from other files.
    """

    text: NewText
    reader: LogReader | None
    is_new: bool


class Follower:
    """Starts and follows a run's command on this node.

    ``logs``: of each attempt, this one last, what the command prints on each node, this one first. What an
    earlier attempt printed is read, too: its command may print until it is ended.

    ``state`` and ``message``: how the run has ended, once that is known. ``transient``: another attempt may
    get further. ``exit_code``: None unless the command ended by itself. ``seen``: what of the output each
    expected pattern matched.
    """

    def __init__(
        self,
        launch: Launch,
        logs: Sequence[Sequence[Path]],
        before: Sequence[Mapping[str, Any]],
        on_row: Callable[[dict[str, Any]], None],
        alive: Callable[[], None],
    ) -> None:
        self._launch = launch
        self._logs = logs
        command = launch.command
        values = launch.values
        source = command.metrics
        assert source is not None
        self.rows = Rows(
            launch.config, before, on_row, values["num_nodes"] * values["num_devices"]
        )
        self._alive = alive
        self._files = NewFiles(
            source, str(Path(command.cwd) / filled(source.place or "", values))
        )
        self._reader_of_files = LogReader(source)
        self._places_path = logs[-1][0].with_suffix(".read")
        places = self._places_of_last_attempt()
        self._outputs: list[_Output] = []
        for logs_of_attempt in logs:
            for log in logs_of_attempt:
                text = NewText(log, places.get(log.name))
                reader = None if source.place else LogReader(source)
                is_new = logs_of_attempt is logs[-1]
                self._outputs.append(_Output(text=text, reader=reader, is_new=is_new))
        # how much of a log is kept, at its begin and at its end
        self._kept_bytes = (command.log_limit_mb << 19) // _BLOCK * _BLOCK
        self._left_out: dict[Path, int] = {}
        expected = [*command.expect]
        if source.preset == "ablate":  # the adapter says that it has applied the recipe
            expected.append(re.escape(applied_line(launch.config.recipe)))
        self._markers = {pattern: re.compile(pattern) for pattern in expected}
        self._refused = [re.compile(pattern) for pattern in command.refuse]
        self._diverged = [
            re.compile(pattern) for pattern in (*DIVERGED, *command.diverged)
        ]
        self._said_diverged = ""
        self._unread_evaluation: tuple[int, str] | None = None
        self._last_line = ""
        self._error = ""
        self._is_started = False
        self.seen: dict[str, str] = {}
        self.state: State = "running"
        self.message: str | None = None
        self.transient = False
        self.exit_code: int | None = None

    @property
    def step(self) -> int:
        """The step of the last row; the plan's last of a run that has finished."""
        return self.rows.plan.steps if self.state == "finished" else self.rows.last

    @property
    def tokens(self) -> int:
        """The tokens at ``step``."""
        return self.rows.plan.tokens if self.state == "finished" else self.rows.tokens

    def follow(
        self,
        should_stop: Callable[[], bool],
        nodes_fault: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Start the command and follow it to its end. ``nodes_fault``: tells that of another node, if any.

        Raises:
            UserError: as ``Launch.start``, or a row does not fit the plan.
        """
        self._look()
        if should_stop():
            self._end("interrupted", "interrupted")
            return
        fault = None
        # At its end also what a launcher has left behind ends.
        with self._launch.started(self._logs[-1][0]) as family:
            self._is_started = True
            self._look()
            while family.poll() is None and self.state == "running" and fault is None:
                is_behind = self._look()
                if should_stop():
                    self._end("interrupted", "interrupted")
                fault = nodes_fault()
                if not is_behind:
                    time.sleep(LOOK_SEC)
            if fault is None:
                self.exit_code = family.poll()
        self._read_to_end()
        self._judge(fault)

    def follow_again(self, exit_code: int | None) -> None:
        """Read the logs of a command that ended with this code in an earlier attempt, and judge that end.

        None: it was ended; unless its rows are complete another attempt goes on. If more rows were expected of
        one that ended with 0, another attempt would only train them again.
        """
        self.exit_code = exit_code
        self._is_started = True
        self._outputs = [replace(output, is_new=True) for output in self._outputs]
        try:
            self._read_to_end()
        except UserError as error:
            self._end("failed", str(error))
        if exit_code is None and self.state == "running":
            self.transient = self.rows.missing() is not None
            if self.transient:
                self._end("interrupted", "its log was read in another way")
            else:
                self.exit_code = 0
        self._judge()
        if exit_code == 0 and self.state == "interrupted":
            self.state = "failed"
            self.transient = False

    def _read_to_end(self) -> None:
        while self._look(ended=True):
            pass
        self._write_places()

    def _end(self, state: State, message: str | None = None) -> None:
        """Set how the run has ended, unless that is known or it was only asked to stop."""
        if self.state in _OPEN:
            self.state = state
            self.message = message

    def _places_of_last_attempt(self) -> dict[str, Any]:
        """Return how far the attempt before has read each log, by its name."""
        if len(self._logs) < 2:
            return {}
        try:
            return read_record(self._logs[-2][0].with_suffix(".read"))
        except (OSError, ValueError):
            # it was killed, so its logs are read from the start
            return {}

    def _write_places(self) -> None:
        """Note how far each log was read, so that the next attempt goes on there."""
        places = {}
        for output in self._outputs:
            if output.text.path.exists():
                places[output.text.path.name] = output.text.known
        write_record(self._places_path, places)

    def _look(self, *, ended: bool = False) -> bool:
        """Read what is new; tell whether there is more."""
        is_behind = False
        for output in self._outputs:
            for lines in output.text.new_pieces(ended=ended):
                self._read_all(lines, output)
            if output.is_new:
                self._keep_within_limit(output.text)
            is_behind = is_behind or output.text.is_behind
        for line in self._files.new(ended=ended):
            self._read(line, self._reader_of_files, is_new=self._is_started)
        if is_behind:
            self._alive()
            self._write_places()
        return is_behind

    def _keep_within_limit(self, text: NewText) -> None:
        """Leave out the middle of a log that is too long, as far as it was read."""
        end = (text.offset - self._kept_bytes) // _BLOCK * _BLOCK
        begin = self._left_out.get(text.path, self._kept_bytes)
        if end - begin >= self._kept_bytes // 8 and leave_out(text.path, begin, end):
            self._left_out[text.path] = end

    def notes(self) -> Iterator[str]:
        """Yield how the log was read and kept, where that is not plain."""
        yield from self.rows.notes()
        for path, end in self._left_out.items():
            mib = (end - self._kept_bytes) >> 20
            yield f"{mib:,} MiB of its output left out of {path.name} (trainer.log_limit_mb)"

    def _read_all(self, lines: list[str], output: _Output) -> None:
        """Read lines; many that say nothing, as of a command that floods its log, are looked at as one."""
        text = "\n".join(lines)
        unseen = [self._markers[pattern] for pattern in self._missing()]
        if not (
            (output.reader is not None and output.reader.may_hold_rows(text))
            or _any_in(text, [*unseen, *self._refused, *self._diverged])
            or (not self.rows.has_evaluations and "val" in text.lower())
        ):
            lines = lines[-5:]
        for line in lines:
            self._read(line, output.reader, is_new=output.is_new)

    def _missing(self) -> list[str]:
        """List the expected patterns that nothing has matched yet."""
        return [pattern for pattern in self._markers if pattern not in self.seen]

    def _read(self, line: str, reader: LogReader | None, *, is_new: bool) -> None:
        has_row = False
        for row in reader.rows(line) if reader else ():
            has_row = True
            self._alive()
            if self.state in _OPEN and (fault := self.rows.add(row, is_new=is_new)):
                self._end("diverged", fault)
        if not is_new:
            return
        if has_row:
            self._error = ""
        elif line and not line.startswith("{"):
            self._note_error(line)
        for pattern in self._missing():
            if match := self._markers[pattern].search(line):
                self.seen[pattern] = match[0]
        if _any_in(line, self._refused):
            shown = safe_text(line)[:200]
            self._end("failed", f"its output says what trainer.refuse names: {shown}")
        if not self._said_diverged and _any_in(line, self._diverged):
            self._said_diverged = safe_text(line)[:200]
        if reader is not None and not self.rows.has_evaluations:
            self._notice_evaluation("" if has_row else line)

    def _note_error(self, line: str) -> None:
        """Keep the line if it may say why the command ends."""
        if _ERROR.match(line) and not (self._error and _LAUNCHERS.search(line)):
            self._error = line
        elif "warn" not in line.lower():
            self._last_line = line

    def _notice_evaluation(self, line: str) -> None:
        """End a run whose evaluations cannot be read, once it has trained for half an interval more."""
        tokens = self.rows.tokens
        if self._unread_evaluation is None:
            if tokens and _LOOKS_LIKE_EVALUATION.search(line):
                self._unread_evaluation = (tokens, safe_text(line)[:120])
            return
        first_tokens, first_line = self._unread_evaluation
        if tokens >= 1.5 * first_tokens:
            self._end(
                "failed",
                f"its evaluations cannot be read (trainer.metrics): '{first_line}'",
            )

    def _judge(self, nodes_fault: str | None = None) -> None:
        """Say how a command has ended that ended by itself. ``nodes_fault``: that of another node."""
        if self.state != "running":
            return
        code = self.exit_code
        if self._said_diverged and code != 0:
            self._end("diverged", f"the command says: {self._said_diverged}")
        elif code == 0 and self.rows.is_new and (missing := self._missing()):
            fault = f"its output never held '{missing[0]}' (trainer.expect)"
            self._end("failed", fault)
        elif code == 0 and self.rows.missing() is None:
            self._end("finished")
        else:
            has_trained_all = code == 0 and self.rows.reaches_end("train")
            may_get_further = self.rows.is_new and not has_trained_all
            self.transient = code in _KILLED or may_get_further
            state: State = "interrupted" if self.transient else "failed"
            end = nodes_fault or f"the command {_exit_text(code or 0)}"
            self._end(state, self._why(end))

    def _why(self, end: str) -> str:
        """Say in a sentence why the command has not finished. ``end``: how it ended."""
        end += f" after step {self.rows.last} of {self.rows.plan.steps}"
        if self.exit_code == 0:
            return f"{end}, {self.rows.missing()}"
        error = safe_text(self._error or self._last_line)[:300]
        return end if self.exit_code in _KILLED or not error else f"{error} ({end})"


def _any_in(text: str, patterns: Sequence[re.Pattern[str]]) -> bool:
    return any(pattern.search(text) for pattern in patterns)


def _exit_text(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (as the kernel does where memory is short)"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
