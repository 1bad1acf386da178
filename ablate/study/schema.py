"""The JSON Schema of study files, with which editors complete keys and mark mistakes.

pydantic makes it from the classes that validate, so that the two agree. Rules between values (one unit of a
target, an arm equal to another, a width that the heads must divide) are left to ``load_study``.
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
    values = [{"type": "array", "minItems": 1}, {"type": "object", "minProperties": 1}]
    schema["$defs"]["GridSection"]["properties"]["factors"] |= {
        "propertyNames": {"enum": factor_paths()},
        "additionalProperties": {"anyOf": values},
    }
    return {
        "$schema": GenerateJsonSchema.schema_dialect,
        **schema,
        "title": "ablate study",
    }
