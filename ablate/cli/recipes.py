"""``ablate recipes``: the published recipes by name, and every operand of one."""

from __future__ import annotations

import shlex
import textwrap
from dataclasses import asdict, replace
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

import click

from ablate.base.errors import UserError, likely
from ablate.cli.common import deliver, format_table, json_option

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.recipes import LayerRecipe, Preset

_SHOWN = ("format", "scale", "block", "rounding")


@click.command(
    "recipes",
    epilog="\b\nExamples:\n  ablate recipes\n  ablate recipes tseng --json\n"
    "  ablate recipes nvidia-nvfp4 --for megatron-te",
)
@click.argument("name", required=False)
@click.option(
    "--for",
    "stack",
    metavar="STACK",
    help="Print the flags that give a trainer this recipe: megatron-te, …",
)
@json_option
def command(name: str | None, stack: str | None, as_json: bool) -> None:
    """List the recipes that a study can name, by source and date; or show one in full.

    In full: its six operands, what its source states, what had to be assumed, and where it was read.
    """
    from ablate.recipes import PRESETS
    from ablate.recipes.short import SHORT_RECIPES

    if name is None:
        if stack is not None:
            raise UserError(
                f"--for {stack} needs a recipe (ablate recipes NAME --for {stack})"
            )
        _list_recipes(as_json=as_json)
    elif name not in SHORT_RECIPES:
        hint = likely(name, SHORT_RECIPES, "`ablate recipes` lists them")
        raise UserError(f"no recipe '{name}' ({hint})")
    elif stack is not None:
        _show_flags(name, stack, as_json=as_json)
    elif name not in PRESETS:
        raise UserError(
            f"'{name}' is a word of study files (recipe: {name}), and no published recipe"
        )
    else:
        preset = PRESETS[name]
        content = asdict(preset) | {"recipe": asdict(preset.recipe)}
        del content["written"]
        deliver(content, _lines(preset), as_json=as_json)


def _show_flags(name: str, stack: str, *, as_json: bool) -> None:
    """Print the flags by which a trainer has a recipe, and what its log must hold then."""
    from ablate.recipes import read_recipe
    from ablate.recipes.stacks import STACKS, flags_for

    if stack not in STACKS:
        raise UserError(f"--for: no stack '{stack}' (expected {', '.join(STACKS)})")
    try:
        flags = flags_for(read_recipe(name), stack)
    except ValueError as error:
        raise UserError(f"recipe '{name}': {error}") from None
    if fault := flags.too_old():
        raise UserError(f"recipe '{name}': {fault}")
    if flags.reads_recipe:
        flags = replace(flags, env={"ABLATE_RECIPE": name, **flags.env})
    words = [f"{variable}={value}" for variable, value in flags.env.items()]
    words += flags.args
    lines = [shlex.join(words) or "(no flags)", f"# read in {flags.read_in}"]
    for package, first in flags.needs.items():
        lines.append(f"# works from {package} {first} on")
    lines += [f"# {note}" for note in flags.notes]
    lines += [f"# its log must hold: {pattern}" for pattern in flags.expect]
    lines += [f"# its log must not hold: {pattern}" for pattern in flags.refuse]
    deliver(asdict(flags), lines, as_json=as_json)


def _list_recipes(*, as_json: bool) -> None:
    from ablate.recipes import PRESETS
    from ablate.recipes.short import SHORT_RECIPES

    recipes = []
    rows = []
    for source, presets in groupby(PRESETS.values(), key=attrgetter("source")):
        rows += [
            ("", ""),
            (source.date, f"{source.authors}, {source.url.removeprefix('https://')}"),
        ]
        for preset in presets:
            rows.append((f"  {preset.name}", preset.summary))
            entry = {
                "name": preset.name,
                "summary": preset.summary,
                "checked": preset.checked,
            }
            recipes.append(entry | asdict(source))
    short = ", ".join(name for name in SHORT_RECIPES if name not in PRESETS)
    lines = [
        format_table(("date, recipe", "source, what it is"), rows),
        f"\n{short} are words too. One in full: ablate recipes NAME",
    ]
    deliver({"recipes": recipes}, lines, as_json=as_json)


def _lines(preset: Preset) -> Iterator[str]:
    from ablate.recipes.describe import (
        describe_deoscillate,
        describe_place,
        describe_start,
    )
    from ablate.study.template import yaml_text

    source, recipe = preset.source, preset.recipe
    yield f"{preset.name}: {preset.summary}"
    yield f"{source.authors}: {source.title} ({source.date})\n  {source.url}\n"
    yield _operands(recipe)
    yield from (
        f"\n{describe_place(rule)}:\n{_operands(rule.recipe)}" for rule in recipe.rules
    )
    yield from (
        f"\n{describe_start(phase)}:\n{_operands(phase.recipe)}"
        for phase in recipe.phases
    )
    if recipe.deoscillate is not None:
        yield f"\nweights de-oscillated {describe_deoscillate(recipe.deoscillate)}"
    printed = {
        "published": preset.published,
        "assumed": preset.assumed,
        "checked": [preset.checked],
    }
    for title, sentences in printed.items():
        yield "\n".join(
            [f"\n{title}:", *(f"  - {sentence}" for sentence in sentences or ["–"])]
        )
    yield f"\nin a study, by its name:\n  recipe: {preset.name}\nor in full:\n  recipe:"
    yield textwrap.indent(yaml_text(preset.written, width=80), "    ")


def _operands(recipe: LayerRecipe) -> str:
    rows = []
    for gemm, operand, policy in recipe.operands():
        values = asdict(policy)
        shown = [values.pop(key) for key in _SHOWN]
        others = (
            f"{key} {value}"
            for key, value in values.items()
            if value != getattr(type(policy), key)
        )
        rows.append((gemm, operand, *shown, ", ".join(others)))
    return format_table(("GEMM", "operand", *_SHOWN, "and"), rows)
