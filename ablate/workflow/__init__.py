"""Whole jobs as plain calls: a verb of the command line without its options and its printing.

Each call takes a ``Where``, and tells a ``Listener`` what happens. The default listener says nothing, and the
command line's prints.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from ablate.store import StudyStore

    Prepared = Callable[[str, float, str], None]
    """Takes a corpus's digest, the fraction of it that is done, and what is being done."""
    Poll = Callable[[], None]
    """Is called a few times a second while runs are executed."""


@dataclass(frozen=True, kw_only=True)
class Where:
    """A storage, a Ray cluster and an MLflow server.

    ``address``: of a Ray cluster; None: Ray on this machine. ``tracking_uri``: of MLflow; None:
    $MLFLOW_TRACKING_URI, else a database in the storage.
    """

    storage: Path
    address: str | None = None
    tracking_uri: str | None = None


class Listener:
    """Ignores everything. Override what you want to show; nothing that a listener does changes a result."""

    def say(self, sentence: str) -> None:
        """Take a sentence for the user, without markup."""

    def preparing(self) -> AbstractContextManager[Prepared]:
        """Follow the preparation of token files during the block."""
        return nullcontext(lambda _digest, _fraction, _what: None)

    def executing(self, store: StudyStore, run_ids: Sequence[str]) -> AbstractContextManager[Poll]:  # noqa: ARG002
        """Follow the execution of these runs during the block; the store has their progress."""
        return nullcontext(lambda: None)
