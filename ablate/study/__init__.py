"""Study files: YAML → a validated ``Study``, or every fault with its line and column.

>>> from ablate.study import load_study
>>> load_study("quickstart").baseline
'bf16'
"""

from ablate.study.load import load_study, shipped_studies
from ablate.study.study import FoldedCell, ResolvedArm, Study

__all__ = [
    "FoldedCell",
    "ResolvedArm",
    "Study",
    "json_schema",
    "load_study",
    "shipped_studies",
]


def json_schema() -> dict[str, object]:
    """Return the JSON Schema (draft 2020-12) of study files, for editors."""
    from ablate.study.schema import json_schema as build

    return build()
