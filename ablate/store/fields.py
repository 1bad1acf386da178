"""Types of the values in the run store's files, and how a file that does not fit is named.

A store may come from elsewhere, or be damaged. Keys that a type does not name are let through, so that the
file of a later version is still read.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

# Built at first use: most of what imports these types reads one file, or none.
PLAIN = ConfigDict(defer_build=True)

# Strict: a quoted number, or a yes where a number belongs, is damage.
Text = Annotated[str, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Whole = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(allow_inf_nan=False, strict=True)]
# No machine counts that far, and sums of such numbers stay exact.
Tokens = Annotated[Whole, Field(ge=0, lt=1 << 62)]
Seed = Annotated[Whole, Field(ge=0, lt=1 << 62)]
Count = Annotated[Whole, Field(ge=1, lt=1 << 31)]

T = TypeVar("T")


def checked(adapter: TypeAdapter[T], content: object) -> T:
    """Read a file's content as a type.

    Raises:
        ValueError: it does not fit; in one line, with the place.
    """
    try:
        return adapter.validate_python(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise ValueError(f"{where}: {first['msg']}") from None
