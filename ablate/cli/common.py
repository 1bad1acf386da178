"""What several verbs share: the storage option and finding a study by name or by file."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ablate.base.errors import UserError
from ablate.store import StudyStore
from ablate.store.runs import default_storage, study_at, study_named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ablate.backends.device import Device


def storage_option(function: Callable[..., Any], other_names: tuple[str, ...] = ()) -> Callable[..., Any]:
    """Add ``--storage DIR`` (default: $ABLATE_STORAGE, else ./ablate-runs)."""
    return click.option(
        "--storage",
        *other_names,
        "storage",
        type=click.Path(path_type=Path, file_okay=False),
        default=default_storage,
        show_default="$ABLATE_STORAGE, else ./ablate-runs",
        help="Folder that holds studies, token cache and the MLflow store.",
    )(function)


def tracking_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--tracking-uri URI``; an address that MLflow does not take is refused before anything is done."""

    def check(_context: click.Context, _option: click.Parameter, uri: str | None) -> str | None:
        from ablate.track.uri import resolve_tracking_uri

        resolve_tracking_uri(Path(), uri)
        return uri

    return click.option(
        "--tracking-uri",
        metavar="URI",
        callback=check,
        help="MLflow server (default: a database in the storage).",
    )(function)


def find_study(storage: Path, study: str) -> StudyStore:
    """Return the store of a study that ran, given its name or its YAML file.

    Raises:
        UserError: nothing of that name has run here; names the likely one.
    """
    name, verb = study, "run"
    if study.endswith((".yaml", ".yml")):
        from ablate.study import load_study

        loaded = load_study(study)
        name, verb = loaded.name, "run" if loaded.search is None else "search"
    return study_named(storage, name, start=f"ablate {verb} {study}")


def find_studies(storage: Path, studies: Sequence[str]) -> list[StudyStore]:
    """Return the stores of several studies: each a name, a YAML file, or a folder of another storage.

    Raises:
        UserError: one is not there, or two are the same.
    """
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
    tuning = store.plan().tuning
    if tuning is None:
        return None
    trials = StudyStore(store.path.parent / tuning.study)
    return trials if trials.plan_path.exists() else None


def device_option(where: str | None) -> tuple[str, Device]:
    """Return a torch device and what it is; by default the first GPU, else the CPU.

    Raises:
        UserError: one that cannot be used here.
    """
    from ablate.backends.device import default_device, device_of

    chosen = where or default_device()
    try:
        return chosen, device_of(chosen)
    except (RuntimeError, AssertionError) as error:  # torch's own, of driver and build
        first = str(error).strip().splitlines()[0]
        raise UserError(f"--device: '{chosen}' cannot be used ({first}); try --device cpu") from None


def write_out(out: Path, content: dict[str, Any]) -> None:
    """Write what a verb measured to the file of its ``--out``."""
    with writing_to(out):
        out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@contextmanager
def writing_to(out: Path) -> Iterator[None]:
    """Turn errors of writing to ``--out`` into a ``UserError``."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--out: cannot write {out}: {error.strerror}") from None


def known_backend(name: str) -> None:
    """Raise ``UserError`` where no back end has that name."""
    from ablate.run.backends import backend_names

    if name not in backend_names():
        raise UserError(f"--backend: no back end '{name}' (expected {', '.join(backend_names())})")


def parse_prices(texts: Sequence[str]) -> dict[str, float]:
    """Return USD for a device-hour by hardware, of texts such as ``B200=4``.

    Raises:
        UserError: hardware that is not known, or no price.
    """
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
