"""What several verbs share: options, and finding a study by name or by file."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ablate.base.command_hints import command_line
from ablate.base.errors import UserError, safe_text
from ablate.base.files import default_storage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from ablate.plan import Plan, PlannedArm
    from ablate.store import RunDir, StudyStore

AT_LEAST_1 = click.IntRange(min=1)


class Place(click.Path):
    """A path whose name can be written into files, and which is no loop of links."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, or refuse it."""
        path: Any = super().convert(value, param, ctx)
        try:
            str(Path(path).absolute()).encode()
            Path(path).stat()
        except UnicodeEncodeError:
            self.fail(f"'{path}' is not UTF-8 (take another name)", param, ctx)
        except OSError as error:
            if error.errno == errno.ELOOP:
                self.fail(f"'{path}' is a loop of links (take another path)", param, ctx)
        return path


FILE = Place(dir_okay=False, path_type=Path)
FOLDER = Place(file_okay=False, path_type=Path)

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object for scripts.")
out_option = click.option("--out", type=FILE, help="Write that object to a file.")
device_option = click.option(
    "--device", help="A torch device: cpu, cuda. Default: the first GPU, else the CPU."
)
address_option = click.option(
    "--address", metavar="ADDRESS", help="A running Ray cluster (default: Ray on this machine)."
)


set_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Take this value for the file's, such as base.training.learning_rate=1e-3; may be given again.",
)


def storage_option(function: Callable[..., Any], other_names: tuple[str, ...] = ()) -> Callable[..., Any]:
    """Add ``--storage DIR`` (default: $ABLATE_STORAGE, else ./ablate-runs)."""
    return click.option(
        "--storage",
        *other_names,
        "storage",
        type=FOLDER,
        default=default_storage,
        show_default="$ABLATE_STORAGE, else ./ablate-runs",
        help="Folder that holds studies, token cache and the MLflow store.",
    )(function)


def _checked(_context: click.Context, _option: click.Parameter, uri: str | None) -> str | None:
    """Refuse an address that MLflow does not take, before anything is done."""
    from ablate.track.uri import resolve_tracking_uri

    resolve_tracking_uri(Path(), uri)
    return uri


tracking_option = click.option(
    "--tracking-uri",
    metavar="URI",
    callback=_checked,
    help="MLflow server (default: a database in the storage).",
)


@contextlib.contextmanager
def ended_by_ctrl_c(again: str) -> Iterator[None]:
    """Let Ctrl-C end the process at once in this block, and say ``again``, the command that goes on.

    As an exception it may strike within an import: some swallow it, others leave half a module behind. What
    has runs to stop first takes the signal for that time (``execute_study``).
    """

    def end(*_: object) -> None:
        shown = "\x1b[?25h" * sys.stderr.isatty()  # a progress bar has hidden the cursor
        os.write(2, f"{shown}\nStopped; go on with: {again}\n".encode())
        os._exit(130)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def find_study(storage: Path, study: str) -> StudyStore:
    """Return the store of a study that ran, given its name or its YAML file."""
    from ablate.store.runs import study_at, study_named

    is_file = study.endswith((".yaml", ".yml"))
    if not is_file and (store := study_at(storage / study)):
        return store
    from ablate.study import load_study, shipped_studies

    if not is_file and study not in shipped_studies():
        return study_named(storage, study)
    loaded = load_study(study)
    verb = "run" if loaded.search is None else "search"
    return study_named(storage, loaded.name, start=command_line(verb, study, storage=storage))


def find_run(
    storage: Path, start: str, study: str | None = None, *, rather: Callable[[RunDir], bool] | None = None
) -> RunDir:
    """Return the run whose id begins so, in any study or in one.

    ``rather``: of one run in several studies, take that which it is true of.
    """
    if not start.isalnum():
        raise UserError(f"'{safe_text(start)}' is no run's id (expected its first letters and digits)")
    if study is not None and not (storage / study / "runs").is_dir():
        raise UserError(f"--study: no study '{safe_text(study)}' in {storage}")
    found = sorted(path for path in storage.glob(f"{study or '*'}/runs/{start}*") if path.is_dir())
    from ablate.store import StudyStore

    runs = [StudyStore(path.parent.parent).run(path.name) for path in found]
    if rather is not None and len({run.run_id for run in runs}) == 1:
        runs = [run for run in runs if rather(run)] or runs
    if len(runs) == 1:
        return runs[0]
    if not runs:
        ids = command_line("status", study or "STUDY", "--runs", storage=storage)
        raise UserError(f"no run '{start}' in {storage} (`{ids}` lists the ids)")
    shown = ", ".join(str(run.path) for run in runs[:4])
    more = " …" if len(runs) > 4 else ""
    raise UserError(f"'{start}' begins {len(runs)} runs' ids: {shown}{more}")


def find_studies(storage: Path, studies: Sequence[str]) -> list[StudyStore]:
    """Return the stores of several studies: each a name, a YAML file, or a folder of another storage."""
    from ablate.store.runs import study_at

    stores = [study_at(Path(study)) or find_study(storage, study) for study in studies]
    known: dict[Path, str] = {}
    for study, store in zip(studies, stores, strict=True):
        path = store.path.resolve()
        if path in known:
            raise UserError(f"'{known[path]}' and '{study}' are the same study: name each once")
        known[path] = study
    return stores


def shown_names(stores: Sequence[StudyStore], names: Sequence[str]) -> list[str]:
    """Return the studies' names; their folders where two have one name."""
    return list(names) if len(set(names)) == len(names) else [str(store.path) for store in stores]


def trials_of(store: StudyStore) -> StudyStore | None:
    """Return the store of the trials of a study that tunes its arms; None if there is none yet."""
    from ablate.store.runs import study_at

    tuning = store.plan().tuning
    return None if tuning is None else study_at(store.path.parent / tuning.study)


def chosen_arms(plan: Plan, names: Collection[str], known: Collection[str]) -> list[PlannedArm]:
    """Return the arms of these names, all without any; ``known``: all names, as the message lists them."""
    for name in names:
        if name not in known:
            raise UserError(f"--arm: no arm '{name}' in study '{plan.study}' (arms: {', '.join(known)})")
    return [arm for arm in plan.arms if not names or arm.name in names]


def known_backend(name: str) -> None:
    """Raise ``UserError`` where no back end has that name."""
    from ablate.run.backends import backend_names

    if name not in backend_names():
        raise UserError(f"--backend: no back end '{name}' (expected {', '.join(backend_names())})")


def price_option(what_for: str) -> Callable[..., Any]:
    """Return ``--price``, whose value is USD for a device-hour by hardware."""
    return click.option(
        "--price",
        "prices",
        multiple=True,
        metavar="HARDWARE=USD",
        callback=_prices,
        help=f"USD for a device-hour, such as B200=4: {what_for}.",
    )


def _prices(_context: click.Context, _option: click.Parameter, texts: tuple[str, ...]) -> dict[str, float]:
    if not texts:
        return {}
    from ablate.modelled.hardware import PEAKS

    prices = {}
    for text in texts:
        name, _, number = text.partition("=")
        if name not in PEAKS:
            raise UserError(f"--price: no hardware '{name}' (expected {', '.join(PEAKS)}, then =USD)")
        try:
            prices[name] = float(number)
        except ValueError:
            prices[name] = -1.0
        if not 0 < prices[name] < float("inf"):
            raise UserError(f"--price: '{text}' has no price (expected a number above 0, such as {name}=2.5)")
    return prices
