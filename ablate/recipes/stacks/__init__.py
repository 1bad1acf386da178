"""Recipes as the flags of others' trainers: one table a stack, in the JSON files of this folder.

A table says in which versions it was read. ``recipes`` pairs a recipe, as a study file writes it, with
arguments, variables of the environment, patterns of the log (read in the files of ``lines_read_in``) and the
versions that it ``needs``; ``blocks`` says how the stack keeps the first and last blocks in BF16,
``deoscillate`` how it resets weights, ``switch`` to what it goes over in mid-run; ``factory`` takes any other
recipe, by ``ablate.integrations``.

TransformerEngine stores a tensor twice: Fprop reads x and w by rows; Dgrad reads dy by rows and w by columns;
Wgrad reads x and dy by columns. So its ``CustomRecipe`` asks for a quantiser of rows and one of columns for
each tensor (d0067d0da, August 2026: custom_recipes/quantizer_factories.py, tensor/hybrid_tensor.py).

How it fails: what a stack cannot express is a ``ValueError`` that says why, and what comes nearest.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from ablate.recipes.describe import describe_place
from ablate.recipes.policy import GEMMS
from ablate.recipes.short import read_recipe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.recipes.policy import (
        LayerRecipe,
        LayerRule,
        OperandPolicy,
        Phase,
        Recipe,
    )

_FLAGS = ("args", "env", "expect", "refuse", "needs", "notes", "read_in")
"""Keys of an entry that say how a stack is started."""
_SCALES = {
    "bf16": ("none", "none"),
    "mxfp8": ("rceil", "1x32"),
    "fp8_e4m3": ("tensor", "none"),
    "fp8_e5m2": ("tensor", "none"),
}
"""The scale and the block of TransformerEngine's quantisers but NVFP4's; bf16 is its identity."""
STACKS = tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.json")))
"""The names of the tables."""


@checked_dataclass(frozen=True, kw_only=True)
class Flags:
    """What a stack is started with. ``read_in``: the versions in which the table was read.

    ``expect``: patterns that its output must hold; one with the group ``setup`` proves only what it was asked
    for (``Command.has_proof``). ``refuse``: patterns that say that it trains in another arithmetic.
    ``needs``: packages, each with the first version that knows the flags; older ones ignore a variable.
    """

    args: tuple[str, ...]
    env: dict[str, str] = Field(default_factory=dict)
    expect: tuple[str, ...] = ()
    refuse: tuple[str, ...] = ()
    needs: dict[str, str] = Field(default_factory=dict)
    reads_recipe: bool = False
    notes: tuple[str, ...] = ()
    read_in: str

    def too_old(self, stated: str = "") -> str | None:
        """Say which package is older than the flags need; None if none is known to be.

        ``stated``: versions in words, such as ``transformer-engine==2.16``; else what is installed here counts.
        """
        for package, first in self.needs.items():
            written = re.search(rf"\b{package}==(\S+)", stated)
            try:
                present = written[1] if written else version(package)
            except PackageNotFoundError:
                continue
            if _major_minor(present) < _major_minor(first):
                return f"{package} {present} is too old: the flags work from {first} on"
        return None


def _major_minor(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)[:2]]


def flags_for(recipe: Recipe, stack: str, *, steps: int | None = None) -> Flags:
    """Return the flags of a recipe. ``steps``: of the run, for what begins at a part of it.

    Raises:
        ValueError: the stack cannot express the recipe; says why, and what comes nearest.
    """
    table = _table(stack)
    entry, differences = _nearest(recipe, table["recipes"])
    factory = table.get("factory")
    if factory is not None and factory.get("whole") and recipe.is_ever_low:
        # Our own code reads rules and phases, too.
        return _flags(factory, factory["args"], table)
    lacking = [*_lacking(recipe, table, steps)]
    if differences and factory is not None:
        try:
            te_quantizers(recipe)
            entry = factory
            differences = {}
        except ValueError as error:
            lacking = [f"the operands ({error})", *lacking]
    elif differences:
        lacking = [*_listed(differences), *lacking]
    if lacking:
        nearest = "the operands"
        if differences:
            nearest = json.dumps(entry["recipe"]).strip('"')
        raise ValueError(
            f"{table['title']} has flags for {nearest}, but none for {'; '.join(lacking)}"
        )
    if recipe.phases:
        entry = _switched(entry, table["switch"], recipe.phases[0], steps or 0)
    return _flags(
        entry, [*entry.get("args", []), *_more_args(recipe, table, steps)], table
    )


def _switched(
    entry: dict[str, Any], switch: dict[str, Any], phase: Phase, steps: int
) -> dict[str, Any]:
    """Add a phase to an entry; steps count from 1."""
    first_step = round((phase.from_fraction or 0) * steps) + 1
    variables = {
        name: text.format(first_step=first_step) for name, text in switch["env"].items()
    }
    switched = entry | {"env": entry["env"] | variables}
    for name in ("expect", "refuse", "notes"):
        switched[name] = [*entry.get(name, []), *switch[name]]
    return switched


def _nearest(
    recipe: Recipe, entries: list[dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, tuple[Any, Any]]]:
    """Return the entry with the fewest differences, and these; another format counts as a hundred."""
    pairs = [(entry, _differences(recipe, entry["read"])) for entry in entries]
    return min(
        pairs, key=lambda pair: sum(100 ** key.endswith("format") for key in pair[1])
    )


def _lacking(recipe: Recipe, table: dict[str, Any], steps: int | None) -> Iterator[str]:
    """Yield what has no flag in a recipe besides its operands."""
    phases = recipe.phases
    if phases:
        if "switch" not in table:
            yield "a switch in mid-run"
        elif len(phases) > 1 or _differences(phases[0].recipe, table["switch"]["read"]):
            yield "a switch in mid-run but one to fp8-delayed"
        elif phases[0].from_fraction is None:
            yield "a switch at a count of tokens (from_fraction has one)"
        elif steps is None:
            yield "a switch at a part of unknown steps (`ablate plan` knows a study's)"
    rules = recipe.rules
    if rules and "blocks" not in table:
        yield "layers of their own"
    elif len(rules) > 1 or not all(map(_is_of_ends, rules)):
        places = "; ".join(map(describe_place, rules))
        yield f"rules on {places} (one on the first n and the last n blocks in bf16 has)"
    resets = recipe.deoscillate
    if resets is None:
        return
    if "deoscillate" not in table:
        yield "resets of oscillating weights"
        return
    if resets.snapshots != "fp32":
        yield "snapshots in bf16"
    if resets.from_tokens:
        yield "resets from a count of tokens on (from_fraction has one)"
    if resets.from_fraction and steps is None:
        yield "resets from a part of unknown steps on (`ablate plan` knows a study's)"


def _is_of_ends(rule: LayerRule) -> bool:
    """Whether a rule keeps a number of first and of last blocks in high precision, and nothing else."""
    is_named = rule.match or rule.role or rule.head
    is_counted = type(rule.last) is int
    return is_counted and not is_named and rule.recipe.is_high_precision


def _more_args(recipe: Recipe, table: dict[str, Any], steps: int | None) -> list[str]:
    """List the arguments for the first and last blocks and for the resets."""
    words: list[str] = []
    for rule in recipe.rules:
        texts = table["blocks"]["args"]
        words += [text.format(first=rule.first, last=rule.last) for text in texts]
    resets = recipe.deoscillate
    if resets is not None:
        start = round((resets.from_fraction or 0) * (steps or 0))
        texts = table["deoscillate"]["args"]
        words += [text.format(start_step=start, **vars(resets)) for text in texts]
    return words


def _flags(entry: dict[str, Any], args: list[str], table: dict[str, Any]) -> Flags:
    content = {"read_in": table["read_in"], **entry, "args": args}
    is_factory = entry is table.get("factory")
    return Flags(
        reads_recipe=is_factory,
        **{name: content[name] for name in _FLAGS if name in content},
    )


def _differences(recipe: LayerRecipe, other: LayerRecipe) -> dict[str, tuple[Any, Any]]:
    """Map the fields of the six operands that differ, such as ``wgrad.dy.rounding``, to both values.

    Of an operand in another format the format alone.
    """
    differences = {}
    pairs = zip(recipe.operands(), other.operands(), strict=True)
    for (gemm, operand, policy), (_, _, other_policy) in pairs:
        for name, value in vars(policy).items():
            other_value = getattr(other_policy, name)
            if value != other_value:
                differences[f"{gemm}.{operand}.{name}"] = (value, other_value)
            if name == "format" and value != other_value:
                break
    return differences


def _listed(differences: dict[str, tuple[Any, Any]]) -> Iterator[str]:
    """Yield differences by field and values, e.g. ``block 1x32 on fprop.w, dgrad.w (it has 32x32)``."""
    groups: dict[tuple[str, Any], list[str]] = {}
    for place, (value, other_value) in differences.items():
        operand, _, name = place.rpartition(".")
        groups.setdefault((f"{name} {value}", other_value), []).append(operand)
    for (wanted, other_value), operands in groups.items():
        yield f"{wanted} on {', '.join(operands)} (there {other_value})"


@cache
def _table(stack: str) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(
        Path(__file__).with_name(f"{stack}.json").read_text(encoding="utf-8")
    )
    entries = list(table["recipes"])
    if "switch" in table:
        entries.append(table["switch"])
    for entry in entries:
        entry["read"] = read_recipe(entry["recipe"])
    return table


@dataclass(frozen=True, kw_only=True)
class Quantizer:
    """One direction of one tensor; all but the kind are of NVFP4 alone."""

    kind: str = "bf16"
    rht: bool = False
    two_dimensional: bool = False
    stochastic: bool = False
    row_scaled: bool = False
    four_six: tuple[str, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Quantizers:
    """Both directions. ``from_rows``: the columns are made of the dequantised rows."""

    rows: Quantizer
    columns: Quantizer
    from_rows: bool = False


def te_quantizers(recipe: LayerRecipe) -> dict[str, Quantizers]:
    """Return the quantisers of ``input``, ``weight`` and ``grad_output``.

    Raises:
        ValueError: an operand that TransformerEngine's quantisers cannot express.
    """
    quantizers = {}
    faults: dict[str, list[str]] = {}
    for gemm, operand, policy in recipe.operands():
        place = f"{gemm}.{operand}"
        try:
            quantizers[place] = _quantizer(place, policy)
        except ValueError as error:
            faults.setdefault(str(error), []).append(place)
    if faults:
        listed = [f"{fault} on {', '.join(faults[fault])}" for fault in faults]
        raise ValueError(f"TransformerEngine has no {'; '.join(listed)}")
    x = quantizers["wgrad.x"]
    is_original = recipe.wgrad.right.source == "high_precision"
    if x.row_scaled and (x != quantizers["fprop.x"] or x.four_six or not is_original):
        message = "a row scale on wgrad.x only of the original x, beside one on fprop.x, and without four-or-six"
        raise ValueError(f"TransformerEngine has {message}")
    if any(recipe.gemm(gemm).accumulate != "fp32" for gemm in GEMMS):
        raise ValueError(
            "accumulate: it is a model of the hardware, which TransformerEngine runs on"
        )
    return {
        "input": Quantizers(
            rows=quantizers["fprop.x"], columns=x, from_rows=not is_original
        ),
        "weight": Quantizers(
            rows=quantizers["fprop.w"],
            columns=quantizers["dgrad.w"],
            from_rows=recipe.dgrad.right.source != "high_precision",
        ),
        "grad_output": Quantizers(
            rows=quantizers["dgrad.dy"], columns=quantizers["wgrad.dy"]
        ),
    }


def _quantizer(where: str, policy: OperandPolicy) -> Quantizer:
    """Translate one operand; a ``ValueError`` names what TransformerEngine lacks."""
    kind = policy.format
    if kind not in _SCALES and kind != "nvfp4":
        raise ValueError(kind)
    # It dequantises rows into the tensor's own dtype, bf16, before it makes columns of them.
    if kind != "bf16" and policy.source == "forward":
        raise ValueError(
            "operand that is quantised from the exact forward values (source: forward_bf16 is its way)"
        )
    if policy.mask or policy.permute:
        raise ValueError("mask or permutation")
    is_known = policy.rounding in ("nearest", "stochastic", "stochastic_8bit")
    if not is_known or policy.prescale != 1.0:
        raise ValueError(
            f"rounding '{policy.rounding}' with prescale {policy.prescale:g}"
        )
    if kind == "nvfp4":
        return _nvfp4_quantizer(where, policy)
    if policy.hadamard or policy.is_stochastic:
        raise ValueError(f"Hadamard or stochastic rounding in {kind}")
    if (policy.scale, policy.block) != _SCALES[kind]:
        raise ValueError(
            f"{kind} with scale '{policy.scale}' and block '{policy.block}'"
        )
    return Quantizer(kind=kind)


def _nvfp4_quantizer(where: str, policy: OperandPolicy) -> Quantizer:
    rule = policy.scale_rule
    if rule.family not in ("two_level", "four_six") or rule.outer == "1x128":
        raise ValueError(f"scale '{policy.scale}'")
    rht = (
        where.startswith("wgrad")
        and policy.hadamard == 16
        and policy.signs == "fixed"
        and policy.rotated_bf16
    )
    if policy.hadamard and not rht:
        raise ValueError(
            f"Hadamard of {policy.hadamard} with signs '{policy.signs}' (its way: 16, fixed, bf16, Wgrad)"
        )
    by_row = rule.outer == "row"
    if by_row and where not in ("fprop.x", "wgrad.x"):
        raise ValueError("row scale")
    if policy.scale != "two_level" and (rht or policy.is_stochastic):
        raise ValueError(
            f"Hadamard or stochastic rounding beside scale '{policy.scale}'"
        )
    four_six = None
    if rule.measure:
        four_six = (rule.measure.upper(), int(rule.largest_scale))
    return Quantizer(
        kind="nvfp4",
        rht=rht,
        two_dimensional=policy.block == "16x16",
        stochastic=policy.is_stochastic,
        row_scaled=by_row,
        four_six=four_six,
    )
