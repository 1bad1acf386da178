"""What several verbs share: options, finding a study by name or by file, tables and JSON."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import shutil
import signal
import string
import sys
import textwrap
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ablate.base.command_hints import command_line, redact
from ablate.base.counts import count_text
from ablate.base.errors import UserError, as_user_error, safe_text
from ablate.base.files import default_storage

if TYPE_CHECKING:
    from collections.abc import (
        Callable,
        Collection,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )

    from ablate.reports import ReportPaths
    from ablate.reports.words.format import Table
    from ablate.store import RunDir, StudyStore
    from ablate.store.plan_file import Target

_GAP = "  "
_NARROWEST = 8


class Utf8Path(click.Path):
    """A path that is valid UTF-8, so that files can contain it, and that is no loop of links."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the path; fail if it is not UTF-8, or a loop of links."""
        path: Any = super().convert(value, param, ctx)
        try:
            str(Path(path).absolute()).encode()
            Path(path).stat()
        except UnicodeEncodeError:
            self.fail(f"'{path}' is not UTF-8 (take another name)", param, ctx)
        except OSError as error:
            if error.errno == errno.ELOOP:
                self.fail(
                    f"'{path}' is a loop of links (take another path)", param, ctx
                )
        return path


PATH = Utf8Path(path_type=Path)
FILE = Utf8Path(dir_okay=False, path_type=Path)
FOLDER = Utf8Path(file_okay=False, path_type=Path)

study_argument = click.argument("study")
flag = partial(click.option, is_flag=True)
count_option = partial(click.option, type=click.IntRange(min=1))
seed_option = click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    help="Seed of weights, data and draws.",
)
json_option = flag("--json", "as_json", help="Print one JSON object for scripts.")
out_option = click.option("--out", type=FILE, help="Write that object to a file.")
device_option = click.option(
    "--device", help="Torch device: cpu or cuda. Default: the first GPU, else the CPU."
)
address_option = click.option(
    "--address",
    metavar="ADDRESS",
    help="Address of a running Ray cluster (default: Ray on this machine).",
)
set_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set a value of the file, such as base.training.learning_rate=1e-3 (may be repeated).",
)


storage_option = click.option(
    "--storage",
    type=FOLDER,
    default=default_storage,
    show_default="$ABLATE_STORAGE, else ./ablate-runs",
    help="Folder of studies, token cache and MLflow store.",
)


def _checked(
    _context: click.Context, _option: click.Parameter, uri: str | None
) -> str | None:
    """Refuse an address that MLflow does not take, before anything is done."""
    if uri is not None or "MLFLOW_TRACKING_URI" in os.environ:
        from ablate.track.sink import resolve_tracking_uri

        resolve_tracking_uri(Path(), uri)
    return uri


tracking_option = click.option(
    "--tracking-uri",
    metavar="URI",
    callback=_checked,
    help="MLflow server (default: $MLFLOW_TRACKING_URI, else a database in the storage).",
)


def target_of(text: str) -> Target:
    """Read ``val_loss=3.3`` or ``perplexity=27.1``, the value of ``--target``.

    Raises:
        UserError: the text is neither.
    """
    from ablate.store.plan_file import Target

    kind, _, value = text.partition("=")
    try:
        target = Target(kind=kind, value=float(value))  # type: ignore[arg-type]
    except ValueError:
        raise UserError(
            f"--target: expected val_loss=NUMBER or perplexity=NUMBER, got '{text}'"
        ) from None
    if target.kind == "perplexity" and target.value <= 1:
        raise UserError(f"--target: a perplexity is above 1, got {target.value:g}")
    return target


def refuse_other_options(
    context: click.Context, takes: Collection[str], what: str
) -> None:
    """Raise ``UserError`` for an option on the command line that ``what`` does not take."""
    for option in context.command.params:
        name = option.name or ""
        is_set = (
            context.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE
        )
        if is_set and isinstance(option, click.Option) and name not in takes:
            raise UserError(f"{option.opts[0]}: not for {what}")


@contextlib.contextmanager
def ended_by_ctrl_c() -> Iterator[str]:
    """Let Ctrl-C end the process at once in this block, and show the command that resumes, which it yields.

    It is this process's command, without logins.

    As an exception it could come during an import: some imports swallow it, others leave half a module
    behind. Code that must stop runs first (``execute_study``) handles the signal itself for that time.
    """
    again = redact(shlex.join(["ablate", *sys.argv[1:]]))

    def end(*_: object) -> None:
        # a progress bar has hidden the cursor
        shown = "\x1b[?25h" * sys.stderr.isatty()
        os.write(2, f"{shown}\nStopped; go on with: {again}\n".encode())
        os._exit(130)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield again
    finally:
        signal.signal(signal.SIGINT, before)


def find_study(storage: Path, study: str) -> StudyStore:
    """Find the store of a study that ran, by its name or YAML file; raises ``UserError`` if there is none."""
    from ablate.store.runs import study_at, study_named

    is_file = study.endswith((".yaml", ".yml"))
    if not is_file and (store := study_at(storage / study)):
        return store
    from ablate.study import load_study, shipped_studies

    if not is_file and study not in shipped_studies():
        return study_named(storage, study)
    loaded = load_study(study)
    verb = "run" if loaded.search is None else "search"
    return study_named(
        storage, loaded.name, start=command_line(verb, study, storage=storage)
    )


def find_run(
    storage: Path,
    start: str,
    study: str | None = None,
    *,
    rather: Callable[[RunDir], bool] | None = None,
) -> RunDir:
    """Find the run whose id begins with ``start``, in ``study`` or in any study.

    ``rather``: if several studies have the run, prefer those for which this is true.

    Raises:
        UserError: there is no such run, or more than one.
    """
    from ablate.store import StudyStore

    if not start.isalnum():
        raise UserError(
            f"'{safe_text(start)}' is no run's id (expected its first letters and digits)"
        )
    if study is not None and not (storage / study / "runs").is_dir():
        raise UserError(f"--study: no study '{safe_text(study)}' in {storage}")
    paths = sorted(storage.glob(f"{study or '*'}/runs/{start}*"))
    folders = [path for path in paths if path.is_dir()]
    runs = [StudyStore(folder.parent.parent).run(folder.name) for folder in folders]
    if rather is not None and len({run.run_id for run in runs}) == 1:
        runs = [run for run in runs if rather(run)] or runs
    if not runs:
        ids = command_line("status", study or "STUDY", "--runs", storage=storage)
        raise UserError(f"no run '{start}' in {storage} (`{ids}` lists the ids)")
    if len(runs) > 1:
        raise UserError(
            f"'{start}' begins {len(runs)} runs' ids: {names_text([str(r.path) for r in runs])}"
        )
    return runs[0]


def deliver(
    content: Any, lines: Iterable[str], *, as_json: bool, out: Path | None = None
) -> None:
    """Print ``content`` as JSON, or the lines for people; write it as JSON to ``out``, too."""
    if out is not None:
        with as_user_error(f"--out: cannot write {out}"):
            out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if as_json:
        click.echo(json.dumps(content, indent=1, ensure_ascii=False))
    else:
        echo_lines(lines)


def echo_lines(lines: Iterable[str]) -> None:
    """Print lines; characters that could control the terminal are escaped."""
    for line in lines:
        click.echo(safe_text(line, keep="\n"))


def names_text(names: Sequence[str]) -> str:
    """Return the first three names, and the number of the others."""
    text = ", ".join(names[:3])
    if len(names) <= 3:
        return text
    return f"{text} and {len(names) - 3} more"


def table_text(table: Table) -> str:
    """Write a table of the report for the terminal; empty if it has no rows, as on pages."""
    if not table.rows:
        return ""
    return safe_text(format_table(table.columns, table.rows), keep="\n")


def verdict_lines(written: ReportPaths) -> Iterator[str]:
    """Yield a report's notices and verdict; a matrix replaces the sentences of its arms."""
    verdict = written.verdict
    yield from written.notices
    yield from filter(None, (verdict.lead, verdict.more, verdict.count))
    for table in written.matrices:
        yield f"\n{table_text(table)}\n"
    yield from (finding.text for finding in written.findings)
    yield from verdict.notes


class _Cells(string.Formatter):
    """Formats None as a dash and a bool as yes or no; adds the formats ``count`` and ``time`` (seconds)."""

    def format_field(self, value: Any, form: str) -> str:
        if value is None:
            return "–"
        if isinstance(value, bool):
            return "yes" if value else "no"
        if form == "count":
            return count_text(value)
        if form == "time":
            from ablate.plan.estimate import duration_text

            return duration_text(value)
        return str(super().format_field(value, form))


def table_of(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Write rows as a table. ``columns``: each header with its cells' format, such as ``{loss:.4f}``."""
    form = _Cells().vformat
    return format_table(
        tuple(columns),
        [[form(text, (), row) for text in columns.values()] for row in rows],
    )


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table as text, fast for thousands of rows.

    Columns are as wide as their content. If the table is wider than the terminal, the widest columns wrap.
    """
    table = [header, *rows]
    widths = [
        max(len(line) for cell in column for line in cell.split("\n"))
        for column in zip(*table, strict=True)
    ]
    room = shutil.get_terminal_size((100, 24)).columns - len(_GAP) * (len(header) - 1)
    while sum(widths) > room and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
    lines = []
    for row in table:
        cells = [_wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
        sides = zip_longest(*cells, fillvalue="")
        lines += [_GAP.join(map(str.ljust, parts, widths)).rstrip() for parts in sides]
    return "\n".join(lines)


def _wrapped(cell: str, width: int) -> list[str]:
    lines: list[str] = []
    for line in cell.split("\n"):
        lines += [line] if len(line) <= width else textwrap.wrap(line, width)
    return lines
