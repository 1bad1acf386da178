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
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from ablate.recipes.place import LayerPlace
    from ablate.recipes.policy import Gemm, Recipe

EVERYTHING = "*"
ALLOW = "model.allow: "
"""How a study file writes what may be out of reach."""
_BY_DEFAULT = "the head keeps high precision unless a rule names it"


@dataclass(frozen=True, kw_only=True)
class Matrix:
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
        return any(fnmatchcase(name, one) for name in self.names for one in patterns)


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """The matrices of a model with their GEMMs in low precision, and why a matrix has none.

    A GEMM counts if it is in low precision at any time of the run. ``low``: name → GEMMs. ``uncovered``: name
    → why. ``notes``: further lines. ``str()`` gives a short text.
    """

    matrices: tuple[Matrix, ...]
    low: Mapping[str, tuple[Gemm, ...]]
    uncovered: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def count(self, gemm: Gemm) -> int:
        """Count the matrices that this GEMM has in low precision."""
        return sum(gemm in gemms for gemms in self.low.values())

    def share(self, gemm: Gemm) -> float:
        """Return the share of this GEMM's FLOPs that is in low precision, 0 to 1."""
        flops = {matrix.name: 2 * matrix.elements * len(matrix.names) for matrix in self.matrices}
        every = sum(flops.values())
        low = sum(flops[name] for name, gemms in self.low.items() if gemm in gemms)
        return low / every if every else 0.0

    @property
    def out_of_reach(self) -> tuple[str, ...]:
        """The names of the matrices that no recipe reaches."""
        return tuple(matrix.name for matrix in self.matrices if matrix.out_of_reach is not None)

    def as_json(self) -> dict[str, Any]:
        """Return plain data: per GEMM the matrices and share of FLOPs in low precision, and ``uncovered``."""
        gemms: dict[str, Any] = {
            gemm: {"matrices": self.count(gemm), "flops_share": self.share(gemm)} for gemm in GEMMS
        }
        return {"matrices": len(self.matrices), **gemms, "uncovered": dict(self.uncovered)}

    def __str__(self) -> str:
        by_share: dict[tuple[int, float], list[str]] = {}
        for gemm in GEMMS:
            by_share.setdefault((self.count(gemm), self.share(gemm)), []).append(gemm.capitalize())
        every = _number(self.matrices)
        lines = [
            f"{', '.join(gemms)}: {count} of {every} in low precision, {share:.1%} of the FLOPs"
            for (count, share), gemms in by_share.items()
        ]
        lines += [f"  not {text}" for text in _with_reasons(self.matrices, self.uncovered)]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def _number(matrices: Sequence[Matrix]) -> str:
    return "1 matrix" if len(matrices) == 1 else f"{len(matrices)} matrices"


def coverage_of(
    recipe: Recipe,
    matrices: Iterable[Matrix],
    where: Mapping[str, LayerPlace],
    *,
    skip: Collection[str] = (),
    notes: Iterable[str] = (),
) -> Coverage:
    """Find what a recipe reaches; ``where``: the places of all matrices within its reach.

    ``skip``: shell patterns of names that the user leaves unchanged.
    """
    known = tuple(matrices)
    low: dict[str, tuple[Gemm, ...]] = {}
    uncovered = {}
    for matrix in known:
        name, low[matrix.name] = matrix.name, ()
        if matrix.named_by(skip):
            uncovered[name] = "skip names it"
        elif matrix.out_of_reach is not None:
            uncovered[name] = f"{_BY_DEFAULT}; " * matrix.is_head + matrix.out_of_reach
        else:
            parts = [phase.recipe for phase in phases_of(recipe, where[name])]
            operands = [one for part in parts for one in part.operands()]
            found = {gemm for gemm, _, policy in operands if not policy.is_high_precision}
            low[name] = tuple(gemm for gemm in GEMMS if gemm in found)
            if not found:
                why = _BY_DEFAULT if matrix.is_head else "a rule of the recipe keeps it in high precision"
                uncovered[name] = why if recipe.is_ever_low else "the recipe is in high precision"
    said = []
    policies = [policy for part in recipe.parts for _, _, policy in part.operands()]
    if any(one.is_high_precision and one.source == "forward" for one in policies):
        said.append("a backward GEMM in high precision multiplies what Fprop multiplied, dequantised")
    if idle := idle_roles(recipe, where):
        said.append(f"no linear layer has the role {', '.join(idle)}")
    unknown = [name for name, place in where.items() if place.role is None]
    if unknown and any(rule.role for rule in recipe.rules):
        said.append(f"the recipe names roles, and that of {', '.join(in_short(unknown))} is not known")
    return Coverage(matrices=known, low=low, uncovered=uncovered, notes=(*said, *notes))


def coverage_faults(
    recipe: Recipe,
    matrices: Iterable[Matrix],
    *,
    allow: Collection[str],
    skip: Collection[str] = (),
    key: str = ALLOW,
) -> Iterator[tuple[str, str]]:
    """Yield (what, hint) for matrices out of reach that nothing allows, and for patterns that name nothing.

    With a recipe in high precision, none counts as out of reach. Heads and matrices in ``skip`` never do.
    ``key``: how the user writes ``allow``.
    """
    known = list(matrices)
    out = [matrix for matrix in known if matrix.out_of_reach is not None]
    yield from _idle_patterns("skip", skip, known, "matrix of the model")
    yield from _idle_patterns(key.rstrip("=: "), allow, out, "matrix that is out of a recipe's reach")
    hidden = [one for one in out if not (one.is_head or one.named_by(skip) or one.named_by(allow))]
    if hidden and recipe.is_ever_low:
        reasons = _with_reasons(hidden, {matrix.name: str(matrix.out_of_reach) for matrix in hidden})
        what = f"the recipe does not reach {_number(hidden)} of the model: {'; '.join(reasons)}"
        patterns = in_short((matrix.name for matrix in hidden), "{}")
        yield what, f"if high precision is meant there: {key}{patterns}"


def _idle_patterns(
    key: str, patterns: Collection[str], matrices: Iterable[Matrix], what: str
) -> Iterator[tuple[str, str]]:
    names = [name for matrix in matrices for name in matrix.names]
    listed = f"expected {one_of(in_short(names, '{}'))}" if names else "there is none"
    for pattern in patterns:
        if pattern != EVERYTHING and not any(fnmatchcase(name, pattern) for name in names):
            yield f"{key}: '{pattern}' names no {what}", likely(pattern, names, listed)


def _with_reasons(matrices: Iterable[Matrix], reasons: Mapping[str, str]) -> list[str]:
    """List the matrices that have a reason, grouped by reason."""
    groups: dict[str, list[str]] = {}
    for matrix in matrices:
        if matrix.name in reasons:
            label = f"{matrix.name} (= {', '.join(matrix.also)})" if matrix.also else matrix.name
            groups.setdefault(reasons[matrix.name], []).append(label)
    return [f"{', '.join(in_short(labels))}: {why}" for why, labels in groups.items()]


def in_short(names: Iterable[str], form: str = "{} ({})") -> list[str]:
    """Group names that differ in numbers alone, as ``layers.*.mixing (12)``; ``form``: pattern and number."""
    groups: dict[str, list[str]] = {}
    for name in names:
        kind = name if name.isdecimal() else re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        groups.setdefault(kind, []).append(name)
    return [form.format(kind, len(own)) if len(own) > 1 else own[0] for kind, own in groups.items()]
