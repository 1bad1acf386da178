"""Parts of a configuration: frozen data, compared and hashed by content so that they can be dict keys.

Their fields may be lists and mappings, which Python does not hash. Contents are compared as JSON, in which
1, 1.0 and true are three different values; Python calls them equal.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, field
from functools import cached_property
from typing import Any, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic_core import PydanticCustomError

_Class = TypeVar("_Class", bound=type)


def key(default: Any, description: str, **rules: Any) -> Any:
    """Describe a key of a study file, for the checks and for the schema; ``rules`` are those of ``Field``.

    Without a default (``...``) the key is required; ``list`` or ``dict`` makes a new one for each object.
    """
    if isinstance(default, type):
        return Field(default_factory=default, description=description, **rules)
    return field(
        default=MISSING if default is ... else default,
        metadata={"description": description, **rules},
    )


def said(what: str, hint: str | None = None, *key: str | int) -> PydanticCustomError:
    """Make an error with its own words, for a section's checks; ``key``: the path to the faulty part."""
    return PydanticCustomError(
        "said", "{what}", {"what": what, "hint": hint, "key": key}
    )


def written_short(section: Any) -> Any:
    """Return a section in a study file's notation, as plain data without default values."""
    return TypeAdapter(type(section)).dump_python(
        section, exclude_defaults=True, mode="json"
    )


@dataclass(frozen=True, eq=False)
class Section:
    """Base class of configuration parts. Each subclass is a ``section``."""

    @cached_property
    def text(self) -> str:
        """The content as JSON with sorted keys; raises ``ValueError`` if a number is not finite."""
        return json.dumps(
            asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False
        )

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        assert isinstance(other, Section)
        return self is other or self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


@dataclass_transform(frozen_default=True, kw_only_default=True, eq_default=False)
def section(cls: _Class) -> _Class:
    """Make a subclass of ``Section`` a frozen dataclass whose fields are checked; other keys are refused."""
    make = checked_dataclass(
        frozen=True, kw_only=True, eq=False, config=ConfigDict(extra="forbid")
    )
    return make(cls)  # type: ignore[return-value]
