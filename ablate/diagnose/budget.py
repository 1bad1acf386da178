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
from typing import TYPE_CHECKING, Any

from ablate.base.errors import UserError
from ablate.recipes import GEMMS, Gemm, GemmPolicy, LayerRule
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
    from ablate.recipes import Recipe

SEEDS = 5
"""Seeds of the study that confirms the proposals."""
Cell = tuple[str, Gemm]
"""A layer's name and a GEMM."""
VENDORS = (
    LayerRule(first=2, last=8),  # NVIDIA, 2509.25149
    LayerRule(last=0.15),  # Nemotron 3 Super, 2604.12374
    LayerRule(role=("attention",)),  # Nemotron 3 Super beside the last blocks; Primus' gpt-oss-20B
)
"""What vendors keep in BF16."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What is kept in BF16, by layer the GEMMs, and the whole recipe as a study file writes it.

    ``share``: of the FLOPs, those in FP4. ``harm``: predicted, of the GEMMs in FP4.
    """

    name: str
    share: float
    harm: float
    in_bf16: dict[str, tuple[Gemm, ...]]
    recipe: dict[str, Any]


def flops(layers: Mapping[str, QuantLinear], cells: Iterable[Cell]) -> int:
    """Count the multiplications of GEMMs for one token."""
    return sum(layers[name].in_features * layers[name].out_features for name, _ in cells)


def check_budget(
    budget: float, recipe: Recipe, layers: Mapping[str, QuantLinear], cells: Sequence[Cell]
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
        raise UserError(f"--budget: the recipe has only {most:.1%} of the FLOPs in FP4", hint=hint)


def policies(
    budget: float, recipe: Recipe, layers: Mapping[str, QuantLinear], harm: Mapping[Cell, float]
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
    found: dict[frozenset[Cell], Policy] = {}

    def add(name: str, kept: Collection[Cell], rule: LayerRule | None = None) -> None:
        left = harm.keys() - kept
        high = {
            layer: gemms
            for layer in layers
            if (gemms := tuple(gemm for gemm in GEMMS if (layer, gemm) in kept))
        }
        rules = [
            LayerRule(
                match=layer, recipe=replace(layers[layer].recipe_at(0), **dict.fromkeys(gemms, GemmPolicy()))
            )
            for layer, gemms in high.items()
        ]
        whole = as_written(replace(recipe, rules=(*([rule] if rule else rules), *recipe.rules)))
        done = sum(max(harm[cell], 0.0) for cell in left)
        policy = Policy(name=name, share=flops(layers, left) / total, harm=done, in_bf16=high, recipe=whole)
        if left:
            found.setdefault(frozenset(kept), policy)

    add("all in FP4", ())
    for rule in VENDORS:
        named = {cell for cell in harm if names_layer(rule, layers[cell[0]].place)}
        add(f"BF16 in {describe_place(rule)}", named, rule)
    shared = any(policy.source != "high_precision" for one in recipe.parts for _, _, policy in one.operands())
    for words, unit in enumerate(["layers"] if shared else ["layers", "GEMMs"], 1):
        groups: dict[tuple[str, ...], list[Cell]] = defaultdict(list)
        for cell in harm:
            groups[cell[:words]].append(cell)
        sized = [
            (flops(layers, one), sum(max(harm[cell], 0.0) for cell in one), one) for one in groups.values()
        ]
        add(f"BF16 in the {unit} of most harm", _most_harm(sized, flops(layers, harm) - budget * total))
    return list(found.values())


def _most_harm(units: Iterable[tuple[int, float, list[Cell]]], spare: float) -> list[Cell]:
    """Choose units of (FLOPs, harm, GEMMs) with the most harm within the spare FLOPs; return their GEMMs."""
    choices: list[tuple[int, float, list[Cell]]] = [(0, 0.0, [])]  # by FLOPs and harm
    for size, gain, cells in units:
        grown = [(a + size, b + gain, [*one, *cells]) for a, b, one in choices if a + size <= spare]
        merged, choices = sorted([*choices, *grown], key=lambda one: (one[0], -one[1])), []
        for one in merged:
            if not choices or one[1] > choices[-1][1]:
                choices.append(one)
    return choices[-1][2]


def confirm_study(name: str, subject: Subject, found: Iterable[Policy], allow: list[str]) -> str:
    """Return the text of a study that trains the policies beside BF16; of a run with a target and a margin.

    Args:
        name: of the study.
        subject: what was diagnosed.
        found: the policies.
        allow: patterns of the matrices that no recipe reaches.
    """
    said = "Written by `ablate diagnose --budget`."
    target = subject.reached and {"val_loss": float(f"{subject.reached:.4g}"), "within": {"cost": 0.05}}
    if (config := subject.run) is None:
        said += " Set base.training; then `ablate pilot --write` finds a target."
        training = TrainingConfig(seq_len=subject.config.training.seq_len)
        config = replace(subject.config, model=replace(subject.config.model, allow=allow), training=training)
    return study_text(
        said,
        {
            "name": name,
            "description": "Which layers stay in BF16: the least predicted harm beside the vendors' rules.",
            "baseline": "bf16",
            "target": target,
            "seeds": SEEDS,
        },
        {part: getattr(config, part) for part in ("model", "data", "training")},
        {"bf16": {"recipe": "bf16"}, **{one.name: {"recipe": one.recipe} for one in found}},
    )
