"""Study files: YAML → a validated ``Study``, or every fault with its line and column.

>>> from ablate.study import load_study
>>> load_study("quickstart").baseline
'bf16'
"""

from ablate.study.load import load_study, shipped_studies
from ablate.study.study import ResolvedArm, Study

__all__ = [
    "ResolvedArm",
    "Study",
    "load_study",
    "shipped_studies",
]
