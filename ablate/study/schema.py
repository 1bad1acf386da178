"""The JSON Schema of study files, with which editors complete keys and mark mistakes.

pydantic makes it from the classes that validate, so that the two agree. Rules that a schema cannot express
(an arm equal to another, a width that the heads must divide) are left to ``load_study``.
"""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from ablate.study.grid import factor_paths
from ablate.study.sections import StudyFile


class _WithoutTitles(GenerateJsonSchema):
    """Editors would show titles in place of the descriptions."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002  pydantic's method
        return False


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of study files, for editors."""
    schema = TypeAdapter(StudyFile).json_schema(schema_generator=_WithoutTitles)
    target, factors = (schema["$defs"][name]["properties"] for name in ("TargetSection", "GridSection"))
    units = ("val_loss", "perplexity")
    schema["$defs"]["TargetSection"]["oneOf"] = [{"required": [unit]} for unit in units]
    for unit in units:
        target[unit] = target[unit]["anyOf"][0] | {"description": target[unit]["description"]}
    values = [
        {"type": kind, f"min{unit}": 1} for kind, unit in (("array", "Items"), ("object", "Properties"))
    ]
    factors["factors"] |= {
        "propertyNames": {"enum": factor_paths()},
        "additionalProperties": {"anyOf": values},
    }
    schema["anyOf"] = [{"required": ["arms"]}, {"required": ["grid"]}]
    return {"$schema": GenerateJsonSchema.schema_dialect, **schema, "title": "ablate study"}
