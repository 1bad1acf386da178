"""Problems that a user can fix, as plain data.

A ``UserError`` carries one or more problems. The command line prints each as one line, without a traceback,
and exits with code 2. Every other exception is a bug in ablate and keeps its traceback.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_Hint = TypeVar("_Hint", str, None)


@dataclass(frozen=True, kw_only=True, order=True)
class Problem:
    """One problem, its place, and how to fix it. ``line`` 0: the place is a ``--set`` of the command line."""

    file: str | None = None
    line: int | None = None
    column: int | None = None
    what: str
    hint: str | None = None

    def __str__(self) -> str:
        parts = (self.file, self.line, self.column)
        place = ":".join(str(part) for part in parts if part is not None)
        text = self.what
        if self.line == 0:
            text = f"--set: {text}"
        elif place:
            text = f"{place}: {text}"
        if self.hint:
            text += f" ({self.hint})"
        return text


class UserError(Exception):
    """Input that cannot be used. ``problems`` holds every problem found, in the order of the file.

    ``file``, ``line`` and ``hint`` apply to problems given as text.
    """

    def __init__(
        self,
        *problems: Problem | str,
        file: object = None,
        line: int | None = None,
        hint: str | None = None,
    ) -> None:
        path = None if file is None else str(file)
        self.problems = tuple(
            Problem(file=path, line=line, what=p, hint=hint)
            if isinstance(p, str)
            else p
            for p in problems
        )
        super().__init__("\n".join(str(p) for p in self.problems))


@contextmanager
def as_user_error(what: str) -> Iterator[None]:
    """Turn an ``OSError`` of the block into a ``UserError``: ``what`` failed, and why."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {error.strerror or error}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def with_type(error: BaseException) -> str:
    """Return an error's type and the first line of its message, if it has one."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def likely(
    name: object, known: Iterable[str], otherwise: _Hint, cutoff: float = 0.6
) -> str | _Hint:
    """Suggest the known name closest to ``name``, whatever its case; ``otherwise`` if none is close."""
    import difflib  # only faults need it

    lowered = {word.lower(): word for word in known}
    close = difflib.get_close_matches(str(name).lower(), lowered, n=1, cutoff=cutoff)
    if close:
        return f"did you mean '{lowered[close[0]]}'?"
    return otherwise


def one_of(words: Sequence[str]) -> str:
    """Join words as a choice: ``a, b or c``."""
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} or {words[-1]}"


def safe_text(text: str, keep: str = "") -> str:
    """Replace unprintable characters except ``keep`` by escapes, so that text cannot control the terminal."""
    if text.isprintable():
        return text
    # Python does not count non-breaking spaces as printable
    harmless = keep + "\u00a0\u202f"
    return "".join(
        c if c.isprintable() or c in harmless else repr(c)[1:-1] for c in text
    )


def cut(text: str, length: int) -> str:
    """Shorten a text to at most ``length`` characters."""
    return text if len(text) <= length else text[: length - 1] + "…"
