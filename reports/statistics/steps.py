"""What each further GEMM adds: pairs of arms that differ in one GEMM's precision and in nothing else.

Found by comparing resolved configurations, not names: in a ladder Fprop, Fprop + Dgrad, all three, each rung
is such a pair. A verdict on which GEMM adds most rests on these, for a comparison with the baseline alone
mixes the GEMMs.

How it fails: an arm whose configuration is not there (no run of it has started) takes part in no pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ablate.recipes import GEMMS
from ablate.reports.statistics.cost import Cost, token_cost

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.run.outcome import Outcome
    from ablate.store.records import RecordedConfig


@dataclass(frozen=True, kw_only=True)
class Step:
    """Putting ``gemm`` into FP4, all else equal: from one arm to another, and what it costs in tokens."""

    gemm: str
    from_arm: str
    to_arm: str
    cost: Cost


def find_steps(
    configs: Mapping[str, RecordedConfig],
    outcomes: Mapping[str, Sequence[Outcome]],
    *,
    paired: bool,
    alphas: Mapping[str, float],
    seeds: Mapping[str, int | None],
) -> tuple[Step, ...]:
    """Return every pair of arms in which the second puts exactly one more GEMM into FP4.

    ``alphas``: each arm's level; two arms are compared at the stricter of theirs. ``seeds``: at how many an
    arm was stopped, None where it was not; of the other arm only as many count.
    """
    usable = {
        arm: config
        for arm, config in configs.items()
        if config.recipe is not None and all(gemm in config.recipe for gemm in GEMMS)
    }

    def cost(first: str, second: str) -> Cost:
        n = min((n for n in (seeds[first], seeds[second]) if n is not None), default=None)
        alpha = min(alphas[first], alphas[second])
        return token_cost(outcomes[second][:n], outcomes[first][:n], paired=paired, alpha=alpha)

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


def _added_gemm(config: RecordedConfig, other: RecordedConfig) -> str | None:
    same = {key: value for key, value in config.whole.items() if key not in ("recipe", "seed")}
    if same != {key: value for key, value in other.whole.items() if key not in ("recipe", "seed")}:
        return None
    first, second = config.recipe or {}, other.recipe or {}
    changed = [gemm for gemm in GEMMS if first[gemm] != second[gemm]]
    if len(changed) != 1:
        return None
    before, after = first[changed[0]], second[changed[0]]
    return changed[0] if _is_fp4(after) and not _is_fp4(before) else None
