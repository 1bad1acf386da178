"""Recipes as the flags of others' trainers: one table a stack, in the JSON files of this folder.

A table says in which versions it was read. ``recipes`` pairs a recipe, as a study file writes it, with
arguments, variables of the environment, patterns of the log (read in the files of ``lines_read_in``) and the
versions that it ``needs``; ``blocks`` says how the stack keeps the first and last blocks in BF16,
``deoscillate`` how it resets weights;
``factory`` takes any other recipe, by ``ablate.integrations``.

TransformerEngine stores a tensor twice: Fprop reads x and w by rows; Dgrad reads dy by rows and w by columns;
Wgrad reads x and dy by columns. So its ``CustomRecipe`` asks for a quantiser of rows and one of columns for
each tensor (d0067d0da, August 2026: custom_recipes/quantizer_factories.py, tensor/hybrid_tensor.py).

How it fails: what a stack cannot express is a ``ValueError`` that says why, and what comes nearest.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ablate.recipes.policy import GEMMS
from ablate.recipes.short import read_recipe

if TYPE_CHECKING:
    from ablate.recipes.policy import LayerRecipe, OperandPolicy, Recipe

Kind = Literal["identity", "mxfp8", "fp8_e4m3", "fp8_e5m2", "nvfp4"]
"""Kinds of TransformerEngine's quantisers."""
STACKS = tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.json")))
"""The names of the tables."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What a stack is started with. ``read_in``: the versions in which the table was read.

    ``expect``: patterns that its output must hold; one with the group ``setup`` proves only what it was asked
    for (``Command.has_proof``). ``refuse``: patterns that say that it trains in another arithmetic.
    ``needs``: packages, each with the first version that knows the flags; older ones ignore a variable.
    """

    args: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    expect: tuple[str, ...] = ()
    refuse: tuple[str, ...] = ()
    needs: dict[str, str] = field(default_factory=dict)
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
    factory = table.get("factory")
    if factory is not None and factory.get("whole") and recipe.is_ever_low:
        # Our own code reads rules and phases, too.
        return _flags(factory, factory["args"], table)
    entry = _entry(recipe, table)
    args = [
        *entry.get("args", []),
        *_args_of_rules(recipe, table),
        *_args_of_resets(recipe, table, steps),
    ]
    return _flags(entry, args, table)


def _entry(recipe: Recipe, table: dict[str, Any]) -> dict[str, Any]:
    """Find the entry of a table that has the six operands of a recipe, or the table's factory for others."""
    differences = []
    for entry in table["recipes"]:
        fields = _differences(recipe, entry["read"])
        if not fields:
            return dict(entry)
        differences.append((entry, fields))
    reason = f"{table['title']} cannot express it"
    if "factory" in table:
        try:
            te_quantizers(recipe)
            return dict(table["factory"])
        except ValueError as error:
            reason = str(error)
    nearest, fields = min(differences, key=lambda pair: len(pair[1]))
    listed = ", ".join(fields[:4])
    if len(fields) > 4:
        listed += ", …"
    written = nearest["recipe"]
    if not isinstance(written, str):
        written = json.dumps(written)
    raise ValueError(
        f"{reason}; the nearest that it can is {written}, which differs in {listed}"
    )


def _args_of_rules(recipe: Recipe, table: dict[str, Any]) -> list[str]:
    title = table["title"]
    if recipe.phases:
        raise ValueError(
            f"{title} has no switch in mid-run; the nearest is two arms, the second with fork:"
        )
    if not recipe.rules:
        return []
    rule = recipe.rules[0]
    is_named = rule.match or rule.role or rule.head
    is_share = type(rule.last) is not int
    if (
        len(recipe.rules) > 1
        or is_named
        or is_share
        or not rule.recipe.is_high_precision
    ):
        raise ValueError(
            f"{title} has flags for the first n and the last n blocks in BF16; other rules are for a "
            "--te-precision-config-file of your own"
        )
    return [
        word.format(first=rule.first, last=rule.last)
        for word in table["blocks"]["args"]
    ]


def _args_of_resets(
    recipe: Recipe, table: dict[str, Any], steps: int | None
) -> list[str]:
    resets = recipe.deoscillate
    if resets is None:
        return []
    if "deoscillate" not in table:
        raise ValueError(f"{table['title']} does not reset oscillating weights")
    if resets.snapshots != "fp32":
        raise ValueError(
            f"{table['title']} as read ({table['read_in']}) compares weights in fp32"
        )
    if steps is None or resets.from_tokens:
        message = "the step at which the resets begin is not known (from_fraction of the run's steps is)"
        raise ValueError(message)
    values = {
        "start_step": round((resets.from_fraction or 0) * steps),
        "window": resets.window,
        "threshold": resets.threshold,
    }
    return [word.format(**values) for word in table["deoscillate"]["args"]]


def _flags(entry: dict[str, Any], args: list[str], table: dict[str, Any]) -> Flags:
    return Flags(
        args=tuple(args),
        env=entry.get("env", {}),
        expect=tuple(entry.get("expect", ())),
        refuse=tuple(entry.get("refuse", ())),
        needs=entry.get("needs", {}),
        read_in=entry.get("read_in", table["read_in"]),
    )


def _differences(recipe: LayerRecipe, other: LayerRecipe) -> list[str]:
    """List the fields of the six operands that differ, such as ``wgrad.dy.rounding``."""
    names = []
    pairs = zip(recipe.operands(), other.operands(), strict=True)
    for (gemm, operand, policy), (_, _, other_policy) in pairs:
        for name, value in vars(policy).items():
            if value != getattr(other_policy, name):
                names.append(f"{gemm}.{operand}.{name}")
    return names


@cache
def _table(stack: str) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(
        Path(__file__).with_name(f"{stack}.json").read_text(encoding="utf-8")
    )
    for entry in table["recipes"]:
        entry["read"] = read_recipe(entry["recipe"])
    return table


@dataclass(frozen=True, kw_only=True)
class Quantizer:
    """One direction of one tensor; all but the kind are of NVFP4 alone."""

    kind: Kind = "identity"
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
    for gemm, operand, policy in recipe.operands():
        quantizers[f"{gemm}.{operand}"] = _quantizer(f"{gemm}.{operand}", policy)
    x = quantizers["wgrad.x"]
    is_original = recipe.wgrad.right.source == "high_precision"
    if x.row_scaled and (x != quantizers["fprop.x"] or x.four_six or not is_original):
        message = "a row scale on wgrad.x only of the original x, beside one on fprop.x, and without four-or-six"
        raise ValueError(f"TransformerEngine has {message}")
    if any(recipe.gemm(gemm).accumulate != "fp32" for gemm in GEMMS):
        raise ValueError(
            "accumulate: 'blackwell' is a model of the hardware, which TransformerEngine runs on"
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
    """Translate one operand."""

    def refused(message: str) -> ValueError:
        return ValueError(f"TransformerEngine has no {message} on {where}")

    low = not policy.is_high_precision
    if policy.format == "fp16":
        raise refused("fp16")
    # It dequantises rows into the tensor's own dtype, bf16, before it makes columns of them.
    if low and policy.source == "forward":
        raise refused(
            "operand that is quantised from the exact forward values (source: forward_bf16 is its way)"
        )
    if (
        policy.rounding not in ("nearest", "stochastic", "stochastic_8bit")
        or policy.prescale != 1.0
        or policy.mask
    ):
        raise refused(f"rounding '{policy.rounding}' with prescale {policy.prescale:g}")
    if policy.permute:
        raise refused("permutation")
    if policy.format == "nvfp4":
        rule = policy.scale_rule
        by_row = rule.outer == "row"
        if rule.family not in ("two_level", "four_six") or rule.outer not in (
            "tensor",
            "row",
        ):
            raise refused(f"scale '{policy.scale}'")
        is_wgrad = where.startswith("wgrad")
        rht = (
            policy.hadamard == 16
            and policy.signs == "fixed"
            and policy.rotated_bf16
            and is_wgrad
        )
        if policy.hadamard and not rht:
            raise refused(
                f"Hadamard of {policy.hadamard} with signs '{policy.signs}' (its way: 16, fixed, bf16, Wgrad)"
            )
        if by_row and where not in ("fprop.x", "wgrad.x"):
            raise refused("row scale")
        if policy.scale != "two_level" and (rht or policy.is_stochastic):
            raise refused(
                f"Hadamard or stochastic rounding beside scale '{policy.scale}'"
            )
        return Quantizer(
            kind="nvfp4",
            rht=rht,
            two_dimensional=policy.block == "16x16",
            stochastic=policy.is_stochastic,
            row_scaled=by_row,
            four_six=(rule.measure.upper(), int(rule.largest_scale))
            if rule.measure
            else None,
        )
    if policy.hadamard or policy.is_stochastic:
        raise refused(f"Hadamard or stochastic rounding in {policy.format}")
    if policy.format == "bf16":
        return Quantizer()
    if policy.format == "mxfp8" and policy.scale == "rceil" and policy.block == "1x32":
        return Quantizer(kind="mxfp8")
    if policy.format in ("fp8_e4m3", "fp8_e5m2") and policy.scale == "tensor":
        return Quantizer(kind=policy.format)
    raise refused(
        f"{policy.format} with scale '{policy.scale}' and block '{policy.block}'"
    )
