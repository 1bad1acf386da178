"""What each further GEMM adds: pairs of arms that differ in one GEMM's precision and in nothing else.

Found by comparing resolved configurations, not names. The verdict on which GEMM adds most rests on these
pairs: a comparison with the baseline alone mixes the GEMMs.

How it fails: an arm without a configuration (no run of it has started) is in no pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ablate.recipes import GEMMS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ablate.results.cost import Cost
    from ablate.store.records import RecordedConfig


@dataclass(frozen=True, kw_only=True)
class Step:
    """Putting ``gemm`` into FP4, all else equal: from one arm to another, and what it costs in tokens."""

    gemm: str
    from_arm: str
    to_arm: str
    cost: Cost


def find_steps(configs: Mapping[str, RecordedConfig], cost: Callable[[str, str], Cost]) -> tuple[Step, ...]:
    """Return every pair of arms in which the second puts exactly one more GEMM into FP4.

    ``cost``: the token cost of the second arm it is given over the first.
    """
    usable = {
        arm: config
        for arm, config in configs.items()
        if config.recipe is not None and all(gemm in config.recipe for gemm in GEMMS)
    }
    return tuple(
        Step(gemm=gemm, from_arm=first, to_arm=second, cost=cost(first, second))
        for first, config in usable.items()
        for second, other in usable.items()
        if (gemm := _added_gemm(config, other)) is not None
    )


def greatest_step(steps: Sequence[Step]) -> str | None:
    """Return the GEMM that adds most, if every interval of its steps lies above all those of the others."""
    gemms = {step.gemm for step in steps}
    if len(gemms) < 2 or any(step.cost.kind != "interval" for step in steps):
        return None
    for gemm in sorted(gemms):
        lows = [step.cost.low for step in steps if step.gemm == gemm and step.cost.low is not None]
        highs = [step.cost.high for step in steps if step.gemm != gemm and step.cost.high is not None]
        if min(lows) > max(highs):
            return gemm
    return None


def _is_fp4(policy: Mapping[str, Any]) -> bool:
    return all("fp4" in str(policy.get(side, {}).get("format", "")) for side in ("left", "right"))


def _beside_gemms(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rules, phases and other parts of a recipe that say anything."""
    return {key: value for key, value in recipe.items() if key not in GEMMS and value}


def _added_gemm(config: RecordedConfig, other: RecordedConfig) -> str | None:
    """Return the only GEMM that the second arm has in FP4 and the first has not, all else equal."""
    rest, other_rest = ({**one.whole, "recipe": None, "seed": None} for one in (config, other))
    first, second = config.recipe or {}, other.recipe or {}
    changed = [gemm for gemm in GEMMS if first[gemm] != second[gemm]]
    if rest != other_rest or _beside_gemms(first) != _beside_gemms(second) or len(changed) != 1:
        return None
    gemm = changed[0]
    return gemm if _is_fp4(second[gemm]) and not _is_fp4(first[gemm]) else None
