"""``ablate recipes``: the published recipes by name, and every operand of one."""

from __future__ import annotations

import io
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ablate.base.errors import UserError, likely
from ablate.cli.common import deliver, format_table, json_option

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.recipes import LayerRecipe, OperandPolicy, Preset


@click.command(
    "recipes",
    epilog="\b\nExamples:\n  ablate recipes\n  ablate recipes show tseng\n  ablate recipes show tseng --json",
)
@click.argument("words", nargs=-1, metavar="[show NAME]")
@json_option
def command(words: tuple[str, ...], as_json: bool) -> None:
    """List the recipes that a study can name; or show one: its six operands, its source, what that states.

    Also what had to be assumed where the source does not state it.
    """
    from ablate.recipes import PRESETS
    from ablate.recipes.short import SHORT_RECIPES

    known = list(dict.fromkeys([*PRESETS, *SHORT_RECIPES]))
    if words:
        name = words[-1]
        if name not in known or words[:-1] not in ((), ("show",)):
            hint = likely(name, known, "`ablate recipes` lists them")
            raise UserError(f"no recipe '{' '.join(words)}' ({hint})")
        if name not in PRESETS:
            raise UserError(f"'{name}' is a word of study files (recipe: {name}), and no published recipe")
        preset = PRESETS[name]
        shown = {key: value for key, value in asdict(preset).items() if key != "written"}
        deliver(shown | {"recipe": asdict(preset.recipe)}, lambda: _lines(preset), as_json=as_json)
        return
    rows = [
        {
            "name": p.name,
            "summary": p.summary,
            "url": p.source.url,
            "year": p.source.year,
            "checked": p.checked,
        }
        for p in PRESETS.values()
    ]

    def lines() -> Iterator[str]:
        table = [(p.name, p.summary, p.source.url.removeprefix("https://")) for p in PRESETS.values()]
        yield format_table(("recipe", "what", "source"), table)
        short = ", ".join(name for name in known if name not in PRESETS)
        yield f"\n{short} are words too. One in full: ablate recipes show NAME"

    deliver({"recipes": rows}, lines, as_json=as_json)


def _lines(preset: Preset) -> Iterator[str]:
    from ablate.recipes.describe import describe_deoscillate, describe_place, describe_start

    source, recipe = preset.source, preset.recipe
    yield f"{preset.name}: {preset.summary}"
    yield f"{source.authors}: {source.title} ({source.year})\n  {source.url}\n"
    yield _operands(recipe)
    yield from (f"\n{describe_place(rule)}:\n{_operands(rule.recipe)}" for rule in recipe.rules)
    yield from (f"\n{describe_start(phase)}:\n{_operands(phase.recipe)}" for phase in recipe.phases)
    if recipe.deoscillate is not None:
        yield f"\nweights de-oscillated {describe_deoscillate(recipe.deoscillate)}"
    said = {"published": preset.published, "assumed": preset.assumed, "checked": [preset.checked]}
    for title, sentences in said.items():
        yield "\n".join([f"\n{title}:", *(f"  - {sentence}" for sentence in sentences or ["–"])])
    yield f"\nin a study, by its name:\n  recipe: {preset.name}\nor in full:\n  recipe:"
    yield "".join(f"    {line}" for line in in_full(preset).splitlines(keepends=True))


def _operands(recipe: LayerRecipe) -> str:
    rows = []
    for gemm, operand, p in recipe.operands():
        scale = p.scale if p.block == "none" else f"{p.scale} {p.block}"
        rounding = p.rounding if p.prescale == 1.0 else f"{p.rounding} × {p.prescale:g}"
        hadamard = {f"H{p.hadamard}": p.hadamard, f"signs: {p.signs}": p.signs != "none"}
        others = {
            "permuted": p.permute,
            "rotated in bf16": p.rotated_bf16,
            "prescale undone on the operand": p.undo == "operand",
            "from the quantised forward": p.source == "forward",
            "from the quantised forward, in bf16": p.source == "forward_bf16",
            "gradient masked": p.mask,
        }
        rotation, rest = (" ".join(w for w, holds in told.items() if holds) for told in (hadamard, others))
        rows.append((gemm, operand, p.format, scale, rounding, rotation, rest))
    return format_table(("GEMM", "operand", "format", "scale", "rounding", "Hadamard", ""), rows)


def in_full(preset: Preset) -> str:
    """Write the recipe out in full as YAML, to stand below ``recipe:`` in a study file."""
    from ruamel.yaml import YAML

    recipe = preset.recipe
    content: dict[str, Any] = _gemms(recipe)
    for name, parts, keys in (
        ("layers", recipe.rules, ("match", "first", "last", "head")),
        ("phases", recipe.phases, ("from_tokens", "from_fraction")),
    ):
        if parts:
            content[name] = [
                {key: getattr(part, key) for key in keys if getattr(part, key)}
                | {"recipe": _gemms(part.recipe) or "bf16"}
                for part in parts
            ]
    if recipe.deoscillate is not None:
        told = asdict(recipe.deoscillate).items()
        content["deoscillate"] = {name: value for name, value in told if value is not None}
    yaml, text = YAML(typ="safe", pure=True), io.StringIO()
    yaml.width = 110
    yaml.default_flow_style = None  # what holds no other mapping stands on one line
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.dump(content, text)
    return text.getvalue()


def _gemms(recipe: LayerRecipe) -> dict[str, Any]:
    from ablate.recipes.policy import HIGH_PRECISION

    text: dict[str, Any] = {}
    for gemm, operand, policy in recipe.operands():
        if policy != HIGH_PRECISION:
            text.setdefault(gemm, {})[operand] = _differences(policy)
    return text


def _differences(policy: OperandPolicy) -> dict[str, Any]:
    from ablate.recipes.policy import DEFAULT_BLOCK, DEFAULT_SCALE, HIGH_PRECISION

    usual = asdict(HIGH_PRECISION) | {
        "scale": DEFAULT_SCALE.get(policy.format, "none"),
        "block": DEFAULT_BLOCK.get(policy.format, "none"),
    }
    return {name: value for name, value in asdict(policy).items() if value != usual[name]}
