"""The colours of arms, the same in the report's figures and in MLflow.

They are those of Okabe and Ito, which colour-blind readers can tell apart.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

INK = "#1b1f24"
HUES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def arm_colours(arms: Iterable[str], baseline: str) -> dict[str, str]:
    """Give the baseline ink and the other arms, in their order, a hue each; after six the hues come again."""
    others = (arm for arm in arms if arm != baseline)
    return {baseline: INK} | dict(zip(others, itertools.cycle(HUES), strict=False))
