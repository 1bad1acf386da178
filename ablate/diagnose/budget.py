"""Which GEMMs to keep in BF16 so that a share of the FLOPs stays in FP4, at the least predicted harm.

The harm of several GEMMs is taken to be the sum of what each does alone (``ranking``); below 0 it counts as
0. The best choice is then a knapsack: the most harm that fits into the FLOPs that may leave FP4. It is solved
exactly (Nemhauser and Ullmann 1969: keep the choices that no other beats in both), for whole layers and for
single GEMMs.

FLOPs are those of the three GEMMs of all linear layers that a recipe can name, the head included; an expert
counts as if every token passed it. *FP4* is whatever low precision the recipe has.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from ablate.base.errors import UserError
from ablate.recipes import GEMMS, Gemm, GemmPolicy, LayerRule, Recipe
from ablate.recipes.coverage import in_short
from ablate.recipes.describe import describe_place
from ablate.recipes.place import names_layer
from ablate.recipes.short import as_written
from ablate.run.config import TrainingConfig
from ablate.study.template import study_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from ablate.diagnose.inputs import Subject
    from ablate.layers.linear import QuantLinear

SEEDS = 5
"""Seeds of the study that confirms the proposals."""
Cell = tuple[str, Gemm]
"""A layer's name and a GEMM."""
VENDORS = (
    LayerRule(first=2, last=8),  # NVIDIA, 2509.25149
    LayerRule(last=0.15),  # Nemotron 3 Super, 2604.12374
    LayerRule(
        role=("attention",)
    ),  # Nemotron 3 Super beside the last blocks; Primus' gpt-oss-20B
)
"""What vendors keep in BF16."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What is kept in BF16, by layer the GEMMs, and the whole recipe as a study file writes it.

    ``share``: of the FLOPs, those in FP4. ``harm``: predicted, of the GEMMs in FP4. ``is_proposal``: not the
    recipe as it is, and no vendor's.
    """

    name: str
    share: float
    harm: float
    in_bf16: dict[str, tuple[Gemm, ...]]
    recipe: dict[str, Any]
    is_proposal: bool


def flops(layers: Mapping[str, QuantLinear], cells: Iterable[Cell]) -> int:
    """Count the multiplications of GEMMs for one token."""
    return sum(
        layers[name].in_features * layers[name].out_features for name, _ in cells
    )


def check_budget(
    budget: float,
    recipe: Recipe,
    layers: Mapping[str, QuantLinear],
    cells: Sequence[Cell],
) -> None:
    """Refuse a budget that a recipe cannot keep; ``cells``: its GEMMs in FP4.

    Raises:
        UserError: the recipe has fewer FLOPs in FP4, or phases.
    """
    if recipe.phases:
        hint = "give the first part alone: a rule for a layer holds for the whole run"
        raise UserError("--budget: the recipe has phases", hint=hint)
    most = flops(layers, cells) / flops(layers, product(layers, GEMMS))
    if most < budget:
        high = in_short(name for name in layers if name not in dict(cells))
        hint = f"lower it, or quantise {', '.join(high) or 'more GEMMs'} too"
        raise UserError(
            f"--budget: the recipe has only {most:.1%} of the FLOPs in FP4", hint=hint
        )


def policies(
    budget: float,
    recipe: Recipe,
    layers: Mapping[str, QuantLinear],
    harm: Mapping[Cell, float],
) -> list[Policy]:
    """Return the recipe as it is, the vendors' rules, and up to two proposals.

    Rules that keep nothing in BF16, or all, are left out, and so is what keeps the same as an earlier policy.
    Single GEMMs are not chosen if one takes an operand from another.

    Args:
        budget: the share of the FLOPs that proposals keep in FP4, within ``check_budget``.
        recipe: what is in FP4.
        layers: all linear layers of the model.
        harm: predicted, of each GEMM in FP4.
    """
    total = flops(layers, product(layers, GEMMS))
    by_kept: dict[frozenset[Cell], Policy] = {}

    def add(name: str, kept: Collection[Cell], rule: LayerRule | None = None) -> None:
        in_fp4 = harm.keys() - kept
        if not in_fp4:
            return
        in_bf16: dict[str, tuple[Gemm, ...]] = {}
        rules = []
        for name_of_layer, layer in layers.items():
            gemms = tuple(gemm for gemm in GEMMS if (name_of_layer, gemm) in kept)
            if gemms:
                in_bf16[name_of_layer] = gemms
                in_high_precision = dict.fromkeys(gemms, GemmPolicy())
                mixed = replace(layer.recipe_at(0), **in_high_precision)
                rules.append(LayerRule(match=name_of_layer, recipe=mixed))
        if rule is not None:
            rules = [rule]
        policy = Policy(
            name=name,
            share=flops(layers, in_fp4) / total,
            harm=_total(harm, in_fp4),
            in_bf16=in_bf16,
            recipe=as_written(replace(recipe, rules=(*rules, *recipe.rules))),
            is_proposal=rule is None and bool(kept),
        )
        by_kept.setdefault(frozenset(kept), policy)

    add("all in FP4", ())
    for rule in VENDORS:
        named = {cell for cell in harm if names_layer(rule, layers[cell[0]].place)}
        add(f"BF16 in {describe_place(rule)}", named, rule)
    spare = flops(layers, harm) - budget * total
    by_layer: dict[str, list[Cell]] = defaultdict(list)
    for cell in harm:
        by_layer[cell[0]].append(cell)
    worst = _most_harm(by_layer.values(), layers, harm, spare)
    add("BF16 in the layers of most harm", worst)
    sources = set()
    for part in recipe.parts:
        sources |= {policy.source for policy in part.policies}
    if sources == {"high_precision"}:
        worst = _most_harm([[cell] for cell in harm], layers, harm, spare)
        add("BF16 in the GEMMs of most harm", worst)
    return list(by_kept.values())


def _total(harm: Mapping[Cell, float], cells: Iterable[Cell]) -> float:
    return sum(max(harm[cell], 0.0) for cell in cells)


class _Choice(NamedTuple):
    """Some GEMMs, their FLOPs for one token and their harm."""

    flops: int = 0
    harm: float = 0.0
    cells: tuple[Cell, ...] = ()


def _most_harm(
    units: Iterable[list[Cell]],
    layers: Mapping[str, QuantLinear],
    harm: Mapping[Cell, float],
    spare: float,
) -> tuple[Cell, ...]:
    """Choose the units with the most harm within the spare FLOPs; return their GEMMs."""
    choices = [_Choice()]  # by FLOPs and harm
    for cells in units:
        unit_flops = flops(layers, cells)
        unit_harm = _total(harm, cells)
        candidates = list(choices)
        for choice in choices:
            if choice.flops + unit_flops <= spare:
                grown = _Choice(
                    choice.flops + unit_flops,
                    choice.harm + unit_harm,
                    (*choice.cells, *cells),
                )
                candidates.append(grown)
        candidates.sort(key=lambda choice: (choice.flops, -choice.harm))
        choices = []
        for choice in candidates:
            if not choices or choice.harm > choices[-1].harm:
                choices.append(choice)
    return choices[-1].cells


def confirm_study(
    name: str, subject: Subject, found: Iterable[Policy], allow: list[str]
) -> str:
    """Return the text of a study that trains the policies beside BF16; of a run with a target and a margin.

    Args:
        name: of the study.
        subject: what was diagnosed.
        found: the policies.
        allow: patterns of the matrices that no recipe reaches.
    """
    comment = "Written by `ablate diagnose --budget`."
    target = subject.reached and {
        "val_loss": float(f"{subject.reached:.4g}"),
        "within": {"cost": 0.05},
    }
    config = subject.run
    if config is None:
        comment += " Set base.training; then `ablate pilot --write` finds a target."
        training = TrainingConfig(seq_len=subject.config.training.seq_len)
        config = replace(
            subject.config,
            model=replace(subject.config.model, allow=allow),
            training=training,
        )
    arms: dict[str, Any] = {"bf16": {"recipe": "bf16"}}
    arms |= {policy.name: {"recipe": policy.recipe} for policy in found}
    return study_text(
        comment,
        {
            "name": name,
            "description": "Which layers stay in BF16: the least predicted harm beside the vendors' rules.",
            "baseline": "bf16",
            "target": target,
            "seeds": SEEDS,
        },
        {part: getattr(config, part) for part in ("model", "data", "training")},
        arms,
    )
