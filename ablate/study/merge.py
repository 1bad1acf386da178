"""Merges inherited and overridden sections into trees, and builds the configuration objects from them.

Results are cached by node: a section that no factor changes is merged, validated and resolved once for the
whole study.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from ablate.base.user_functions import is_file
from ablate.recipes import GEMMS, SHORT_RECIPES, Recipe, RecipeSpec, SenselessRecipe, resolve
from ablate.run.config import DataConfig, ModelConfig, ResourcesConfig, TrainingConfig
from ablate.run.presets import PRESETS
from ablate.store.plan_file import ForkPoint
from ablate.study.sections import ForkSection
from ablate.study.tree import Mapping, Node, Path, Scalar, Sequence, get, merge, nest, plain

if TYPE_CHECKING:
    from collections.abc import Mapping as AbstractMapping

_TYPES: dict[str, Any] = {
    "model": ModelConfig,
    "data": DataConfig,
    "training": TrainingConfig,
    "recipe": RecipeSpec,
    "resources": ResourcesConfig,
    "fork": ForkSection,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Draft:
    """An arm as merged nodes. ``lineage``: the parts of the file that it inherits from, its own first."""

    name: str
    description: str | None
    node: Node
    lineage: tuple[Path, ...]
    sections: AbstractMapping[str, Node]
    factors: AbstractMapping[str, Any]

    def node_to_report(self, *paths: str) -> Node:
        """Return the node to report for a fault of dotted paths: the arm's own before an inherited one."""
        split = ([int(part) if part.isdecimal() else part for part in path.split(".")] for path in paths)
        nodes = [node for section, *rest in split if (node := get(self.sections.get(str(section)), *rest))]
        return min(nodes, key=self._distance, default=self.node)

    def _distance(self, node: Node) -> int:
        for distance, prefix in enumerate(self.lineage):
            if node.path[: len(prefix)] == prefix:
                return distance
        return len(self.lineage)


def override_section(section: str, under: Node | None, over: Node) -> Node:
    """Lay an override over an inherited section; a recipe's word, a preset or a new model replaces it."""
    if section == "model":
        is_whole = any(get(over, key) is not None for key in ("preset", "hf", "function"))
        return merge(None if is_whole else under, _expand_preset(over))
    if section == "recipe":
        is_word = isinstance(over, Scalar)
        over = _expand_recipe(over)
        return over if is_word or under is None else merge(_expand_recipe(under), over)
    return merge(under, over)


def _expand_preset(node: Node) -> Node:
    preset = get(node, "preset")
    fields = PRESETS.get(str(preset.value)) if isinstance(preset, Scalar) else None
    if fields is None or preset is None or not isinstance(node, Mapping):
        return node
    own = {key: value for key, value in node.entries.items() if key != "preset"}
    return merge(_at(preset, fields), replace(node, entries=own))


def _expand_recipe(node: Node) -> Node:
    if isinstance(node, Scalar) and isinstance(node.value, str) and node.value in SHORT_RECIPES:
        return _at(node, SHORT_RECIPES[node.value])
    if not isinstance(node, Mapping):
        return node
    expanded = {
        key: nest(("format",), value)
        if key in GEMMS and isinstance(value, Scalar) and isinstance(value.value, str)
        else value
        for key, value in node.entries.items()
    }
    return replace(node, entries=expanded)


def _at(node: Node, value: Any) -> Node:
    """Return plain data as a tree whose nodes all have the place of ``node``."""
    place: dict[str, Any] = {"path": node.path, "line": node.line, "column": node.column}
    if isinstance(value, dict):
        below = {key: _at(node, item) for key, item in value.items()}
        return Mapping(**place, entries=below, keys=dict.fromkeys(below, node))
    if isinstance(value, list):
        return Sequence(**place, items=tuple(_at(node, item) for item in value))
    return Scalar(**place, value=value, text=str(value))


@cache
def _adapter(section: str) -> TypeAdapter[Any]:
    return TypeAdapter(_TYPES[section])


def _resolved(spec: RecipeSpec) -> Recipe | SenselessRecipe:
    try:
        return resolve(spec)
    except SenselessRecipe as error:
        return error


class SectionBuilder:
    """Builds configuration objects from merged nodes. ``folder``: the folder of the study's file.

    ``build(section, node)`` returns the section's object, None if a part of it has a fault (reported
    elsewhere). ``recipe(spec)`` returns the operand policies, or why the recipe contradicts itself.
    """

    def __init__(self, folder: FilePath) -> None:
        self._folder = folder
        self.build = cache(self._build)
        self.recipe = cache(_resolved)

    def _build(self, section: str, node: Node | None) -> Any:
        if section == "backend":
            return "auto" if node is None else plain(node)
        if section == "trainer":
            trainer = None if node is None else plain(node)
            return self._join_code(trainer) if isinstance(trainer, str) else None
        if section == "fork" and (node is None or plain(node) is None):
            return None
        try:
            built = _adapter(section).validate_python({} if node is None else plain(node))
        except ValidationError:
            return None
        if isinstance(built, ModelConfig) and not built.is_built_in:
            return replace(
                built,
                hf=None if built.hf is None else self._join_existing(built.hf),
                function=None if built.function is None else self._join_code(built.function),
            )
        if isinstance(built, ForkSection):
            return ForkPoint(arm=built.from_ or "", tokens=built.at or 1)
        return self._absolute(built) if isinstance(built, DataConfig) else built

    def _join_code(self, reference: str) -> str:
        """Resolve a function's file against the study's folder; names of modules are kept."""
        place, colon, name = reference.partition(":")
        return f"{self._join(place)}{colon}{name}" if is_file(reference) else reference

    def _absolute(self, data: DataConfig) -> DataConfig:
        """Resolve paths against the study's folder; names on the hub are kept."""
        if data.source == "hub":  # [data set, configuration]
            paths = [self._join_existing(path) for path in data.paths[:1]] + data.paths[1:]
            data = replace(data, paths=paths)
        else:
            data = replace(
                data,
                paths=[self._join(path) for path in data.paths],
                validation_paths=[self._join(path) for path in data.validation_paths],
            )
        if data.tokenizer_path is not None:
            data = replace(data, tokenizer_path=self._join_existing(data.tokenizer_path))
        return data

    def _join_existing(self, path: str) -> str:
        """Resolve a path that could be a hub name, if the file exists or the text cannot be a hub name."""
        local = self._join(path)
        is_local = path.startswith((".", "/", "~")) or FilePath(local).exists()
        return local if is_local and path else path

    def _join(self, path: str) -> str:
        given = FilePath(path)
        with contextlib.suppress(RuntimeError):  # no such user (~nobody): keep the path as it is
            given = given.expanduser()
        return str(self._folder / given)
