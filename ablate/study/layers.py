"""What an arm inherits: the parts of the file that are laid over each other, and where each value is written.

Sections are cached by the layers that make them, because thousands of grid cells share most layers. Only a
fault asks where a value is written: in the uppermost layer that sets it.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import cache
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ablate.base.user_functions import is_file
from ablate.recipes import GEMMS, SHORT_RECIPES, RecipeSpec
from ablate.run.architecture import PRESETS
from ablate.run.command import Command
from ablate.run.config import DataConfig, ModelConfig, ResourcesConfig, TrainingConfig
from ablate.store.plan_file import ForkPoint
from ablate.study.sections import ForkSection
from ablate.study.source import follow

if TYPE_CHECKING:
    from ablate.study.source import Path, Source

Layer = tuple["Path", "Path"]
"""The path of a part in the file, and its path in an arm."""
Layers = tuple[tuple[Layer, ...], ...]
"""The parts set by the base, then by each arm of a chain of ``from``, then by a cell of the grid."""

_TYPES: dict[str, Any] = {
    "model": ModelConfig,
    "data": DataConfig,
    "training": TrainingConfig,
    "recipe": RecipeSpec,
    "resources": ResourcesConfig,
    "trainer": Command,
    "fork": ForkSection,
}


def locate(source: Source, layers: Layers, *fields: str) -> Path | None:
    """Find where the file writes one of an arm's ``fields`` (dotted paths); None if it writes none.

    The arm's own layer is searched before those that it inherits; in a layer, the first field wins.
    """
    paths = [tuple(int(part) if part.isdecimal() else part for part in field.split(".")) for field in fields]
    for stack in reversed(layers):
        for path in list(paths):
            for where, into in reversed(stack):
                if into[0] != path[0]:
                    continue
                part, replaces = _part(source, (where, into))
                found, steps = follow(part, path[1:])
                if steps == len(path) - 1:
                    at = (*where, *path[len(into) :])
                    if at not in source.places and source.get(*where, "preset") is not None:
                        at = (*where, "preset")
                    while at not in source.places:  # the file has one word instead
                        at = at[:-1]
                    return at
                if replaces or not isinstance(found, dict):
                    paths.remove(path)  # this layer replaces the inherited value
                    break
    return None


def _part(source: Source, layer: Layer) -> tuple[Any, bool]:
    """Return a layer's value for its section, and whether it replaces all that is inherited."""
    where, (section, *inside) = layer
    value = source.get(*where)
    for key in reversed(inside):
        value = {key: value}
    if section == "recipe":
        if isinstance(value, str):
            return SHORT_RECIPES.get(value, value), True
        if isinstance(value, dict):  # a GEMM's word is its format
            value = value | {
                gemm: {"format": value[gemm]} for gemm in GEMMS if isinstance(value.get(gemm), str)
            }
    replaces = False
    if section == "model" and isinstance(value, dict):
        replaces = any(value.get(key) is not None for key in ("preset", "hf", "function"))
        if (fields := PRESETS.get(str(value.get("preset")))) is not None:
            value = fields | {key: said for key, said in value.items() if key != "preset"}
    return value, replaces


def _merge(under: Any, over: Any) -> Any:
    if not (isinstance(under, dict) and isinstance(over, dict)):
        return over
    return under | {key: _merge(under.get(key), value) for key, value in over.items()}


def factors_of(source: Source, layers: Layers) -> dict[str, Any]:
    """Map dotted paths to the leaves that an arm and its parents set, as written; without the base's."""
    factors: dict[str, Any] = {}
    for stack in layers[1:]:
        for where, into in stack:
            _put(factors, ".".join(map(str, into)), source.get(*where))
    return factors


def _put(factors: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(value, dict) and value:
        for key, below in value.items():
            _put(factors, f"{name}.{key}", below)
        return
    for part in [part for part in factors if part.startswith(f"{name}.")]:
        del factors[part]  # setting the whole replaces its parts
    factors[name] = value


class Sections:
    """Merges and builds sections. ``folder``: of the study's file, for its relative paths."""

    def __init__(self, source: Source, folder: FilePath) -> None:
        self._source, self._folder = source, folder
        self._build = cache(self._build_one)

    def build(self, name: str, layers: Layers) -> tuple[Any, dict[str, Any]]:
        """Return an arm's section, None if it has a fault (reported elsewhere), and its keys as written."""
        return self._build(name, tuple(layer for stack in layers for layer in stack if layer[1][0] == name))

    def _build_one(self, name: str, layers: tuple[Layer, ...]) -> tuple[Any, dict[str, Any]]:
        merged: Any = None
        for layer in layers:
            part, replaces = _part(self._source, layer)
            merged = part if replaces else _merge(merged, part)
        if name == "backend":  # a word, checked with the file, as a training function is
            return str(merged or "auto"), {}
        if name == "trainer" and not isinstance(merged, dict):
            return None if merged is None else self._join_code(str(merged)), {}
        if name == "fork" and merged is None:
            return None, {}
        try:
            built = _TYPES[name](**(merged or {}))
        except (ValidationError, TypeError):  # it is no mapping, or its keys or values are wrong
            return None, {}
        if (
            name == "training"
            and built.tokens < built.eval_every_tokens
            and "eval_every_tokens" not in merged
        ):
            built = replace(built, eval_every_tokens=max(1, built.tokens // 10))
        return self._resolved(built), merged or {}

    def _resolved(self, built: Any) -> Any:
        """Resolve paths against the study's folder; names on the hub and of modules are kept."""
        if isinstance(built, ForkSection):
            return ForkPoint(arm=built.from_ or "", tokens=built.at or 1)
        if isinstance(built, ModelConfig) and not built.is_built_in:
            hf, function = built.hf, built.function
            hf, function = hf and self._join_existing(hf), function and self._join_code(function)
            return replace(built, hf=hf, function=function)
        if isinstance(built, Command):
            return replace(built, cwd=self._join(built.cwd))
        if not isinstance(built, DataConfig):
            return built
        paths, validation, tokenizer = built.paths, built.validation_paths, built.tokenizer_path
        of_hub = built.source == "hub"  # [data set, configuration]
        return replace(
            built,
            paths=[*map(self._join_existing, paths[:1]), *paths[1:]] if of_hub else [*map(self._join, paths)],
            validation_paths=[*map(self._join, validation)],
            tokenizer_path=tokenizer and self._join_existing(tokenizer),
        )

    def _join_code(self, reference: str) -> str:
        place, colon, name = reference.partition(":")
        return f"{self._join(place)}{colon}{name}" if is_file(reference) else reference

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
