"""The JSON Schema of study files, with which editors complete keys and mark mistakes.

It is generated from the classes that validate, so that the two agree. Rules that a schema cannot express (an
arm equal to another, a width that the heads must divide) are left to ``load_study``.
"""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from ablate.study.grid import factor_paths
from ablate.study.messages import type_at
from ablate.study.sections import TUNABLE, BaseSection, RangeSection, StudyFile

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_REFERENCE = "#/$defs/{model}"


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of study files, for editors."""
    schema = TypeAdapter(StudyFile).json_schema()
    definitions = schema["$defs"]
    _exactly_one_unit(definitions["TargetSection"])
    definitions["GridSection"]["properties"]["factors"] = _factors(definitions)
    definitions["TuneSection"]["properties"]["fields"] = _tuned_fields(definitions)
    schema["anyOf"] = [{"required": ["arms"]}, {"required": ["grid"]}]
    _drop_titles(schema)
    return {"$schema": _DRAFT, "title": "ablate study", **schema}


def _exactly_one_unit(target: dict[str, Any]) -> None:
    target["oneOf"] = [{"required": ["val_loss"]}, {"required": ["perplexity"]}]
    for unit in ("val_loss", "perplexity"):
        nullable = target["properties"][unit]
        target["properties"][unit] = nullable["anyOf"][0] | {"description": nullable["description"]}


def _factors(definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the factors' schema: every path that can be a factor, with the type of its values."""
    properties: dict[str, Any] = {}
    for path in factor_paths():
        value, description = _field(path, definitions)
        listed = {"type": "array", "items": value, "minItems": 1}
        labelled = {"type": "object", "additionalProperties": value, "minProperties": 1}
        properties[path] = {"anyOf": [listed, labelled], **description}
    return _mapping("path of a field: its values, as a list or as {label: value}", properties)


def _tuned_fields(definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of tuned fields: each as a range or a list of its values."""
    definitions.setdefault("RangeSection", TypeAdapter(RangeSection).json_schema(ref_template=_REFERENCE))
    properties: dict[str, Any] = {}
    for name in TUNABLE:
        value, description = _field(f"training.{name}", definitions)
        listed = {"type": "array", "items": value, "minItems": 2}
        properties[name] = {"anyOf": [{"$ref": "#/$defs/RangeSection"}, listed], **description}
    return _mapping("field of training: {low, high, log} or a list of values", properties)


def _field(path: str, definitions: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the schema of a field's values, and its description if it has one; add what it refers to."""
    value = TypeAdapter(type_at(BaseSection, tuple(path.split(".")))).json_schema(ref_template=_REFERENCE)
    for name, definition in value.pop("$defs", {}).items():
        definitions.setdefault(name, definition)
    value.pop("default", None)
    return value, {"description": value.pop("description")} if "description" in value else {}


def _mapping(description: str, properties: dict[str, Any]) -> dict[str, Any]:
    shape = {"properties": properties, "additionalProperties": False, "minProperties": 1}
    return {"type": "object", "description": description, **shape}


def _drop_titles(schema: Any) -> None:
    """Remove pydantic's titles: editors would show them in place of the descriptions."""
    if isinstance(schema, list):
        for item in schema:
            _drop_titles(item)
    if isinstance(schema, dict):
        if isinstance(schema.get("title"), str):
            del schema["title"]
        for item in schema.values():
            _drop_titles(item)
