"""The tables of the study file's keys in the pages, by the schema: ``<!-- keys: SECTION … -->`` stands before each.

``REWRITE=1 pytest tests/study/test_docs.py`` writes them anew.
"""

from __future__ import annotations

import json
import re
from typing import Any

from ablate.study.schema import json_schema

TABLE = re.compile(r"(<!-- keys: (.*) -->\n)(?:\n(?:\|.*\n)+)?")
LONG_LIST = 4
JSON_TYPES = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "`true`, `false`",
    "object": "a mapping",
}


def with_tables(page: str) -> str:
    """Return a page with each of its tables as the schema has it now."""
    first_keys: dict[str, str] = {}
    return TABLE.sub(
        lambda mark: f"{mark[1]}\n{keys(mark[2].split(), first_keys)}\n", page
    )


def keys(sections: list[str], first_keys: dict[str, str]) -> str:
    """Return the table of the keys of sections: ``SECTION`` or ``SECTION:key,key`` of the JSON Schema.

    ``first_keys``: long lists of values, and the key of this page that has each first. Later keys name that one.
    """
    schema = json_schema()
    rows = ["| key | meaning | values | default |", "|---|---|---|---|"]
    for section in sections:
        name, _, chosen = section.partition(":")
        fields = (schema["$defs"] | {"StudyFile": schema})[name]["properties"]
        for key, field in fields.items():
            if chosen and key not in chosen.split(","):
                continue
            values = _values(field)
            for listed, first_key in first_keys.items():
                place = "above" if first_key == key else f"`{first_key}`"
                values = values.replace(listed, f"as {place}")
            if values.count(",") >= LONG_LIST:
                first_keys.setdefault(values.partition(" or ")[0], key)
            row = (f"`{key}`", _meaning(field), values, _default(field))
            rows.append(f"| {' | '.join(row)} |")
    return "\n".join(rows)


def _meaning(field: dict[str, Any]) -> str:
    return _cell(field.get("description") or "")


def _values(field: dict[str, Any]) -> str:
    """Return what a field of the schema takes, in a few words."""
    kinds = field.get("anyOf") or field.get("oneOf") or [field]
    words = []
    for kind in kinds:
        if "enum" in kind:
            listed = [str(value) for value in kind["enum"]]
            words.append(
                ", ".join(f"`{value}`" for value in listed)
                if len(listed) < 20
                else "a name"
            )
        elif "anyOf" in kind:
            words.append(_values(kind))
        elif "$ref" in kind:
            words.append("a mapping")
        elif kind.get("type") == "array":
            words.append("a list")
        elif kind.get("type") != "null":
            words.append(JSON_TYPES.get(kind.get("type", ""), kind.get("const", "")))
    return _cell(" or ".join(dict.fromkeys(filter(None, words))))


def _default(field: dict[str, Any]) -> str:
    if field.get("default") is None:
        return ""
    return _cell(f"`{json.dumps(field['default']).strip(chr(34))}`")


def _cell(text: str) -> str:
    return text.replace("|", "&#124;").replace("<", "&lt;")
