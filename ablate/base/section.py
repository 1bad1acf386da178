"""A part of a configuration: frozen data that compare and hash by their content, so that dicts can hold them.

Its fields may be lists and mappings, which Python does not hash. And what it compares is the content as JSON:
1, 1.0 and true are three values there, while Python calls them equal.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property


@dataclass(frozen=True, eq=False)
class Section:
    """The base of such a part. Each class under it is a dataclass with ``eq=False``."""

    @cached_property
    def text(self) -> str:
        """The content as JSON with its keys in order; ``ValueError`` where a number is not finite."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        assert isinstance(other, Section)
        return self is other or self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)
