"""Types of the values in the run store's files, and the message for a file that does not fit them.

A store may be damaged or come from elsewhere. Unknown keys are allowed, so that files of later versions can
be read.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

if TYPE_CHECKING:
    from collections.abc import Callable

# Built on first use: a module that imports these types reads one file or none.
PLAIN = ConfigDict(defer_build=True)

# Strict: a quoted number, or a yes in place of a number, is damage.
Text = Annotated[str, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Whole = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(allow_inf_nan=False, strict=True)]
# Sums of numbers below this bound stay exact.
Tokens = Annotated[Whole, Field(ge=0, lt=1 << 62)]
Seed = Annotated[Whole, Field(ge=0, lt=1 << 62)]
Time = Annotated[Number, Field(ge=0, lt=1e11)]
"""Unix seconds; no valid time is later than the year 5138."""
Count = Annotated[Whole, Field(ge=1, lt=1 << 31)]


def _check_training(training: dict[str, Any]) -> dict[str, Any]:
    for key in ("tokens", "warmup_tokens", "decay_tokens"):
        tokens = training.get(key)
        if not (tokens is None or (type(tokens) is int and 0 <= tokens < 1 << 62)):
            raise PydanticCustomError("tokens", f"'{key}' should be a number of tokens")
    schedule = training.get("schedule")
    if not (schedule is None or isinstance(schedule, str)):
        raise PydanticCustomError("schedule", "'schedule' should be a string")
    return training


Training = Annotated[dict[str, Any], AfterValidator(_check_training)]
"""A section ``training`` as the file holds it: complete for own studies, for imports what their logs tell."""

T = TypeVar("T")
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def checked(kind: type[T], content: object) -> T:
    """Validate a file's content as a dataclass.

    Raises:
        ValueError: the content does not fit; one line that names the place.
    """
    try:
        found: T = _adapter(kind).validate_python(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise ValueError(f"{where}: {first['msg']}") from None
    return found
