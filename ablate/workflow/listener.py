"""The listener hears what happens while a study is prepared and run. The default ignores it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from ablate.store import StudyStore

    Prepared = Callable[[str, float, str], None]
    """Takes a corpus's digest, the fraction of it that is done, and what is being done."""
    Poll = Callable[[], None]
    """Is called a few times a second while runs are executed."""


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
