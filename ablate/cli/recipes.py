"""``ablate recipes``: the published recipes by name, and every operand of one."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ablate.base.errors import UserError, likely
from ablate.cli.common import json_option
from ablate.cli.output import echo_json, format_table, terminal_width

if TYPE_CHECKING:
    from ablate.recipes import LayerRecipe, OperandPolicy, Preset


class _Group(click.Group):
    """A group that answers a recipe's name in place of a command with a hint."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands and not cmd_name.startswith("-"):
            from ablate.recipes import PRESETS

            _refuse_word(cmd_name)
            close = likely(cmd_name, (*PRESETS, *_words(), "show"), "")
            meant = close.replace("'", "'show ", 1) if close and "'show'" not in close else close
            raise UserError(f"no command '{cmd_name}' ({meant or 'expected show NAME'})")
        return super().get_command(ctx, cmd_name)


@click.group(
    "recipes",
    cls=_Group,
    invoke_without_command=True,
    epilog="\b\nExamples:\n  ablate recipes\n  ablate recipes show tseng\n  ablate recipes show tseng --json",
)
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """List the recipes that a study can name, or show one of them."""
    if ctx.invoked_subcommand is not None:
        return
    from ablate.recipes import PRESETS

    if as_json:
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
        echo_json({"recipes": rows})
        return
    table = [(p.name, p.summary, _short(p.source.url)) for p in PRESETS.values()]
    click.echo(format_table(("recipe", "what", "source"), table, width=_width()))
    click.echo(f"\n{', '.join(_words())} are words too. One in full: ablate recipes show NAME")


@command.command("show")
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """Show a recipe's six operands, its source, what that states and what had to be assumed."""
    from ablate.recipes import PRESETS

    _refuse_word(name)
    if name not in PRESETS:
        hint = likely(name, (*PRESETS, *_words()), "`ablate recipes` lists them")
        raise UserError(f"no recipe '{name}' ({hint})")
    if as_json:
        echo_json(asdict(PRESETS[name]))
    else:
        click.echo("\n".join(_lines(PRESETS[name])))


def _words() -> list[str]:
    from ablate.recipes import PRESETS
    from ablate.recipes.short import SHORT_RECIPES

    return [name for name in SHORT_RECIPES if name not in PRESETS]


def _refuse_word(name: str) -> None:
    if name in _words():
        raise UserError(f"'{name}' is a word of study files (recipe: {name}), and no published recipe")


def _short(url: str) -> str:
    return url.replace("https://arxiv.org/abs/", "arXiv:").removeprefix("https://github.com/")


def _width() -> int:
    return min(terminal_width(80), 120)


def _lines(preset: Preset) -> list[str]:
    from ablate.recipes.describe import describe_deoscillate, describe_place, describe_start

    source, recipe = preset.source, preset.recipe
    lines = [
        f"{preset.name}: {preset.summary}",
        f"{source.authors}: {source.title} ({source.year})",
        f"  {source.url}",
        "",
        _operands(recipe),
    ]
    lines += [f"\n{describe_place(rule)}:\n{_operands(rule.recipe)}" for rule in recipe.rules]
    lines += [f"\n{describe_start(phase)}:\n{_operands(phase.recipe)}" for phase in recipe.phases]
    if recipe.deoscillate is not None:
        lines += [f"\nweights de-oscillated {describe_deoscillate(recipe.deoscillate)}"]
    lines += ["\npublished:", *(f"  - {line}" for line in preset.published)]
    if preset.assumed:
        lines += ["assumed:", *(f"  - {line}" for line in preset.assumed)]
    lines += [f"checked:\n  - {preset.checked}"]
    return [
        *lines,
        f"\nin a study, by its name:\n  recipe: {preset.name}\nor in full:\n  recipe:",
        _yaml(preset),
    ]


def _operands(recipe: LayerRecipe) -> str:
    rows = []
    for gemm, operand, p in recipe.operands():
        scale = p.scale if p.block == "none" else f"{p.scale} {p.block}"
        rounding = p.rounding if p.prescale == 1.0 else f"{p.rounding} × {p.prescale:g}"
        hadamard = f"H{p.hadamard}" if p.hadamard else ""
        signs = f"signs: {p.signs}" if p.signs != "none" else ""
        rows.append((gemm, operand, p.format, scale, rounding, f"{hadamard} {signs}".strip(), _rest(p)))
    header = ("GEMM", "operand", "format", "scale", "rounding", "Hadamard", "")
    return format_table(header, rows, width=_width())


def _rest(policy: OperandPolicy) -> str:
    said = {
        "permuted": policy.permute,
        "rotated in bf16": policy.rotated_bf16,
        "prescale undone on the operand": policy.undo == "operand",
        "from the quantised forward": policy.source == "forward",
        "from the quantised forward, in bf16": policy.source == "forward_bf16",
        "gradient masked": policy.mask,
    }
    return ", ".join(words for words, holds in said.items() if holds)


def _yaml(preset: Preset) -> str:
    """Write the recipe out in full as YAML, indented to stand below ``recipe:``."""
    recipe = preset.recipe
    text: dict[str, Any] = _gemms(recipe)
    for name, parts, keys in (
        ("layers", recipe.rules, ("match", "first", "last", "head")),
        ("phases", recipe.phases, ("from_tokens", "from_fraction")),
    ):
        if parts:
            text[name] = [
                {key: getattr(part, key) for key in keys if getattr(part, key)}
                | {"recipe": _gemms(part.recipe) or "bf16"}
                for part in parts
            ]
    if recipe.deoscillate is not None:
        text["deoscillate"] = {
            name: value for name, value in asdict(recipe.deoscillate).items() if value is not None
        }
    return "\n".join(_block(text, 4))


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


def _block(mapping: dict[str, Any], indent: int) -> list[str]:
    """Return a mapping's lines; what fits into 110 columns stands on one."""
    lines = []
    for key, below in mapping.items():
        line = f"{' ' * indent}{key}: {_flow(below)}"
        if len(line) <= 110 or not isinstance(below, dict | list):
            lines.append(line)
            continue
        lines.append(f"{' ' * indent}{key}:")
        if isinstance(below, dict):
            lines += _block(below, indent + 2)
            continue
        for item in below:
            first, *rest = _block(item, indent + 4)
            lines += [f"{' ' * (indent + 2)}- {first.lstrip()}", *rest]
    return lines


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(below)}" for key, below in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str) and not value.isidentifier():
        return json.dumps(value)  # a pattern such as *.ffn.down
    return str(value)
