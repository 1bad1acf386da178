"""What a recipe reaches in a model: matrices and FLOPs in low precision, and the names of the rest.

A matrix costs each of the three GEMMs 2 × its elements FLOPs per token, at every place where the model holds
it. All experts are counted; of a convolution, one position. Plain data without torch, for planning too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ablate.base.errors import likely, one_of
from ablate.recipes.place import idle_roles, phases_of
from ablate.recipes.policy import GEMMS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from ablate.recipes.place import LayerPlace
    from ablate.recipes.policy import Gemm, Recipe

EVERYTHING = "*"
ALLOW = "model.allow: "
"""How a study file writes what may be out of reach."""
_BY_DEFAULT = "the head keeps high precision unless a rule names it"


@dataclass(frozen=True, kw_only=True)
class WeightMatrix:
    """A matrix that GEMMs may use: a linear layer by its name, or another parameter by its own.

    ``elements``: 0 while unknown. ``also``: names of the same layer at other places. ``out_of_reach``: why no
    recipe reaches it, None if one does.
    """

    name: str
    elements: int
    is_head: bool = False
    also: tuple[str, ...] = ()
    out_of_reach: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Its names at all places."""
        return (self.name, *self.also)

    def named_by(self, patterns: Collection[str]) -> bool:
        """Whether a shell pattern matches one of its names."""
        return any(
            fnmatchcase(name, pattern) for name in self.names for pattern in patterns
        )


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """The matrices of a model with their GEMMs in low precision, and why a matrix has none.

    A GEMM counts if it is in low precision at any time of the run. ``low``: name → GEMMs. ``uncovered``: name
    → why. ``notes``: further lines. ``str()`` gives a short text.
    """

    matrices: tuple[WeightMatrix, ...]
    low: Mapping[str, tuple[Gemm, ...]]
    uncovered: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def count(self, gemm: Gemm) -> int:
        """Count the matrices that this GEMM has in low precision."""
        return sum(gemm in gemms for gemms in self.low.values())

    def share(self, gemm: Gemm) -> float:
        """Return the share of this GEMM's FLOPs that is in low precision, 0 to 1."""
        flops = 0
        low_flops = 0
        for matrix in self.matrices:
            of_matrix = 2 * matrix.elements * len(matrix.names)
            flops += of_matrix
            if gemm in self.low[matrix.name]:
                low_flops += of_matrix
        return low_flops / flops if flops else 0.0

    @property
    def out_of_reach(self) -> tuple[str, ...]:
        """The names of the matrices that no recipe reaches."""
        return tuple(
            matrix.name for matrix in self.matrices if matrix.out_of_reach is not None
        )

    def as_json(self) -> dict[str, Any]:
        """Return plain data: per GEMM the matrices and share of FLOPs in low precision, and ``uncovered``."""
        content: dict[str, Any] = {"matrices": len(self.matrices)}
        for gemm in GEMMS:
            content[gemm] = {
                "matrices": self.count(gemm),
                "flops_share": self.share(gemm),
            }
        content["uncovered"] = dict(self.uncovered)
        return content

    def __str__(self) -> str:
        by_share: dict[tuple[int, float], list[str]] = {}
        for gemm in GEMMS:
            by_share.setdefault((self.count(gemm), self.share(gemm)), []).append(
                gemm.capitalize()
            )
        total = _number(self.matrices)
        lines = []
        for (count, share), gemms in by_share.items():
            lines.append(
                f"{', '.join(gemms)}: {count} of {total} in low precision, {share:.1%} of the FLOPs"
            )
        reasons = _with_reasons(self.matrices, self.uncovered)
        lines += [f"  not {reason}" for reason in reasons]
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)


def _number(matrices: Collection[object]) -> str:
    if len(matrices) == 1:
        return "1 matrix"
    return f"{len(matrices)} matrices"


def coverage_of(
    recipe: Recipe,
    matrices: Iterable[WeightMatrix],
    places: Mapping[str, LayerPlace],
    *,
    skip: Collection[str] = (),
    notes: Iterable[str] = (),
) -> Coverage:
    """Find what a recipe reaches; ``places``: those of all matrices within its reach.

    ``skip``: shell patterns of names that the user leaves unchanged.
    """
    matrices = tuple(matrices)
    low: dict[str, tuple[Gemm, ...]] = {}
    uncovered = {}
    for matrix in matrices:
        name = matrix.name
        low[name] = ()
        if matrix.named_by(skip):
            uncovered[name] = "skip names it"
        elif matrix.out_of_reach is not None:
            prefix = f"{_BY_DEFAULT}; " if matrix.is_head else ""
            uncovered[name] = prefix + matrix.out_of_reach
        elif gemms := _low_gemms(recipe, places[name]):
            low[name] = gemms
        elif not recipe.is_ever_low:
            uncovered[name] = "the recipe is in high precision"
        elif matrix.is_head:
            uncovered[name] = _BY_DEFAULT
        else:
            uncovered[name] = "a rule of the recipe keeps it in high precision"
    all_notes = (*_notes(recipe, places), *notes)
    return Coverage(matrices=matrices, low=low, uncovered=uncovered, notes=all_notes)


def _low_gemms(recipe: Recipe, place: LayerPlace) -> tuple[Gemm, ...]:
    low = set()
    for phase in phases_of(recipe, place):
        for gemm, _, policy in phase.recipe.operands():
            if not policy.is_high_precision:
                low.add(gemm)
    return tuple(sorted(low, key=GEMMS.index))


def _notes(recipe: Recipe, places: Mapping[str, LayerPlace]) -> Iterator[str]:
    if any(
        policy.is_high_precision and policy.source == "forward"
        for part in recipe.parts
        for policy in part.policies
    ):
        yield "a backward GEMM in high precision multiplies what Fprop multiplied, dequantised"
    if idle := idle_roles(recipe, places):
        yield f"no linear layer has the role {', '.join(idle)}"
    unknown = [name for name, place in places.items() if place.role is None]
    if unknown and any(rule.role for rule in recipe.rules):
        yield f"the recipe names roles, and that of {', '.join(in_short(unknown))} is not known"


def coverage_faults(
    recipe: Recipe,
    matrices: Iterable[WeightMatrix],
    *,
    allow: Collection[str],
    skip: Collection[str] = (),
    key: str = ALLOW,
) -> Iterator[tuple[str, str]]:
    """Yield (what, hint) for matrices out of reach that nothing allows, and for patterns that name nothing.

    With a recipe in high precision, none counts as out of reach. Heads and matrices in ``skip`` never do.
    ``key``: how the user writes ``allow``.
    """
    matrices = list(matrices)
    out_of_reach = [matrix for matrix in matrices if matrix.out_of_reach is not None]
    yield from _idle_patterns("skip", skip, matrices, "matrix of the model")
    kind = "matrix that is out of a recipe's reach"
    yield from _idle_patterns(key.rstrip("=: "), allow, out_of_reach, kind)
    reasons: dict[str, str] = {}
    for matrix in out_of_reach:
        if not (matrix.is_head or matrix.named_by(skip) or matrix.named_by(allow)):
            reasons[matrix.name] = str(matrix.out_of_reach)
    if reasons and recipe.is_ever_low:
        listed = "; ".join(_with_reasons(out_of_reach, reasons))
        message = f"the recipe does not reach {_number(reasons)} of the model: {listed}"
        hint = f"if high precision is meant there: {key}{in_short(reasons, '{}')}"
        yield message, hint


def _idle_patterns(
    key: str,
    patterns: Collection[str],
    matrices: Iterable[WeightMatrix],
    kind: str,
) -> Iterator[tuple[str, str]]:
    names = [name for matrix in matrices for name in matrix.names]
    expected = f"expected {one_of(in_short(names, '{}'))}" if names else "there is none"
    for pattern in patterns:
        is_idle = not any(fnmatchcase(name, pattern) for name in names)
        if is_idle and pattern != EVERYTHING:
            message = f"{key}: '{pattern}' names no {kind}"
            yield message, likely(pattern, names, expected)


def _with_reasons(
    matrices: Iterable[WeightMatrix], reasons: Mapping[str, str]
) -> list[str]:
    """List the matrices that have a reason, grouped by reason."""
    groups: dict[str, list[str]] = {}
    for matrix in matrices:
        if matrix.name in reasons:
            label = matrix.name
            if matrix.also:
                label += f" (= {', '.join(matrix.also)})"
            groups.setdefault(reasons[matrix.name], []).append(label)
    return [
        f"{', '.join(in_short(labels))}: {reason}" for reason, labels in groups.items()
    ]


def in_short(names: Iterable[str], form: str = "{} ({})") -> list[str]:
    """Group names that differ in numbers alone, as ``layers.*.mixing (12)``; ``form``: pattern and number."""
    groups: dict[str, list[str]] = {}
    for name in names:
        pattern = name
        if not name.isdecimal():
            pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        groups.setdefault(pattern, []).append(name)
    labels = []
    for pattern, members in groups.items():
        label = members[0]
        if len(members) > 1:
            label = form.format(pattern, len(members))
        labels.append(label)
    return labels
