"""The parts of the file that make an arm: laid over each other, then validated, each section once.

A fault of a section has the place where the uppermost part writes it. Sections are cached by their parts,
because thousands of grid cells share most of them.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from ablate.base.user_functions import is_file
from ablate.recipes import GEMMS, SHORT_RECIPES
from ablate.run.architecture import PRESETS
from ablate.run.command import Command
from ablate.run.config import DataConfig, ModelConfig
from ablate.store.plan_file import ForkPoint
from ablate.study.sections import BaseSection, ForkSection, type_of
from ablate.study.source import KEY, follow

if TYPE_CHECKING:
    from ablate.run.config import TrainingConfig
    from ablate.study.faults import Faults
    from ablate.study.source import Path, Source


class Part(NamedTuple):
    """A value of the file: its path there, and the path in an arm that it sets."""

    written_at: Path
    sets: tuple[str, ...]


@dataclass(frozen=True)
class Parts:
    """The parts of an arm in groups: those of the base, of each arm that it inherits from, and its own.

    A later group is laid over the earlier ones. ``arm``: its name. ``is_cell``: it is a cell of the grid.
    """

    groups: tuple[tuple[Part, ...], ...]
    arm: str = ""
    is_cell: bool = False

    @property
    def home(self) -> Path:
        """Where the file names the arm, or what its cell is made of."""
        if self.is_cell:
            return ("grid", "factors", KEY)
        return ("arms", self.arm, KEY)

    def under(self, *group: Part) -> Parts:
        """Lay another group over these."""
        return replace(self, groups=(*self.groups, group))


def locate(source: Source, parts: Parts, *fields: str) -> Path | None:
    """Find where the file writes one of an arm's ``fields`` (dotted paths); None if it writes none.

    The arm's own group is searched before those that it inherits; in a group, the first field wins.
    """
    paths = [
        tuple(int(key) if key.isdecimal() else key for key in field.split("."))
        for field in fields
    ]
    for group in reversed(parts.groups):
        for path in list(paths):
            place, is_replaced = _place_in(source, group, path)
            if place is not None:
                return place
            if is_replaced:
                paths.remove(path)
    return None


def nearest(source: Source, parts: tuple[Part, ...], path: Path) -> Path:
    """Find where the uppermost part writes the value at a path of an arm, or the value around it."""
    place, _ = _place_in(source, parts, path)
    return nearest(source, parts, path[:-1]) if place is None else place


def _place_in(
    source: Source, parts: tuple[Part, ...], path: Path
) -> tuple[Path | None, bool]:
    """Return where parts write the value at a path, and whether they replace what others say of it."""
    for part in reversed(parts):
        if part.sets[0] != path[0]:
            continue
        value, replaces = _value_of(source, part)
        value, steps = follow(value, path[1:])
        if steps == len(path) - 1:
            return _written(source, part, path), True
        if replaces or not isinstance(value, dict):
            return None, True
    return None, False


def _written(source: Source, part: Part, path: Path) -> Path:
    place = (*part.written_at, *path[len(part.sets) :])
    if (
        place not in source.places
        and source.get(*part.written_at, "preset") is not None
    ):
        place = (*part.written_at, "preset")
    while place not in source.places:  # the file has one word instead
        place = place[:-1]
    return place


def _value_of(source: Source, part: Part) -> tuple[Any, bool]:
    """Return a part's value for its section, and whether it replaces all that is inherited."""
    section, *keys = part.sets
    value = source.get(*part.written_at)
    for key in reversed(keys):
        value = {key: value}
    if section == "recipe":
        return _recipe_value(value)
    if section == "model" and isinstance(value, dict):
        return _model_value(value)
    return value, False


def _recipe_value(value: Any) -> tuple[Any, bool]:
    if isinstance(value, str):
        return SHORT_RECIPES.get(value, value), True
    if isinstance(value, dict):
        value = dict(value)
        for gemm in GEMMS:
            if isinstance(value.get(gemm), str):  # a GEMM's word is its format
                value[gemm] = {"format": value[gemm]}
    return value, False


def _model_value(value: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    replaces = any(value.get(key) is not None for key in ("preset", "hf", "function"))
    preset = value.get("preset")
    if preset is None or str(preset) in PRESETS:
        own_fields = {key: field for key, field in value.items() if key != "preset"}
        value = PRESETS.get(preset or "", {}) | own_fields
    return value, replaces


def _merge(under: Any, over: Any) -> Any:
    if not (isinstance(under, dict) and isinstance(over, dict)):
        return over
    return under | {key: _merge(under.get(key), value) for key, value in over.items()}


def factors_of(source: Source, parts: Parts) -> dict[str, Any]:
    """Map dotted paths to the leaves that an arm and its parents set, as written; without the base's."""
    factors: dict[str, Any] = {}
    for group in parts.groups[1:]:
        for part in group:
            _put(factors, ".".join(part.sets), source.get(*part.written_at))
    return factors


def _put(factors: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(value, dict) and value:
        for key, below in value.items():
            _put(factors, f"{name}.{key}", below)
        return
    for factor in list(factors):
        if factor.startswith(f"{name}."):
            del factors[factor]  # setting the whole replaces its parts
    factors[name] = value


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _with_evaluations(training: TrainingConfig) -> TrainingConfig:
    """Evaluate ten times in a budget that is smaller than the usual interval."""
    if training.eval_every_tokens <= training.tokens:
        return training
    return replace(training, eval_every_tokens=max(1, training.tokens // 10))


class Built(NamedTuple):
    """A section of an arm, None if it has a fault, and its keys as written."""

    value: Any
    written: dict[str, Any]


class Sections:
    """Builds the sections of arms. ``folder``: of the study's file, for its relative paths."""

    def __init__(self, faults: Faults, folder: FilePath) -> None:
        self._faults = faults
        self._folder = folder
        self._built = cache(self._build)

    def build(self, section: str, parts: Parts) -> Built:
        """Merge and validate an arm's section; its faults are added to those of the file."""
        of_section = tuple(
            part for group in parts.groups for part in group if part.sets[0] == section
        )
        return self._built(section, of_section)

    def check(self, part: Part) -> None:
        """Check a value of the file as that of an arm."""
        self._built(part.sets[0], (part,))

    def _build(self, section: str, parts: tuple[Part, ...]) -> Built:
        source = self._faults.source
        merged: Any = None if parts else getattr(BaseSection(), section)
        for part in parts:
            value, replaces = _value_of(source, part)
            merged = value if replaces else _merge(merged, value)
        written = merged if isinstance(merged, dict) else {}
        kind = type_of(section)
        if section == "model" and "preset" not in written:
            kind = ModelConfig  # in place of a known preset there are its fields
        try:
            value = _adapter(kind).validate_python(merged)
        except ValidationError as error:
            find = partial(nearest, source, parts)
            self._faults.add_validation(
                error, BaseSection, prefix=(section,), find=find
            )
            return Built(None, {})
        if section == "training" and "eval_every_tokens" not in written:
            value = _with_evaluations(value)
        return Built(self._resolved(value, section), written)

    def _resolved(self, value: Any, section: str) -> Any:
        """Resolve paths against the study's folder; names on the hub and of modules are kept."""
        if isinstance(value, ForkSection):
            return ForkPoint(arm=value.from_ or "", tokens=value.at or 1)
        if isinstance(value, Command):
            return replace(value, cwd=self.join(value.cwd))
        if isinstance(value, DataConfig):
            return self._resolved_data(value)
        if isinstance(value, ModelConfig) and value.hf is not None:
            value = replace(value, hf=self._join_existing(value.hf))
        if isinstance(value, ModelConfig) and value.function is not None:
            value = replace(value, function=self._join_code(value.function))
        if section == "trainer" and isinstance(value, str):
            return self._join_code(value)
        return value

    def _resolved_data(self, data: DataConfig) -> DataConfig:
        if data.source == "hub":  # [data set, configuration]
            paths = [*map(self._join_existing, data.paths[:1]), *data.paths[1:]]
        else:
            paths = [*map(self.join, data.paths)]
        tokenizer = data.tokenizer_path
        return replace(
            data,
            paths=paths,
            validation_paths=[*map(self.join, data.validation_paths)],
            tokenizer_path=tokenizer and self._join_existing(tokenizer),
        )

    def _join_code(self, reference: str) -> str:
        place, colon, name = reference.partition(":")
        return f"{self.join(place)}{colon}{name}" if is_file(reference) else reference

    def _join_existing(self, path: str) -> str:
        """Resolve a path that could be a hub name, if the file exists or the text cannot be a hub name."""
        local = self.join(path)
        is_local = path.startswith((".", "/", "~")) or FilePath(local).exists()
        return local if is_local and path else path

    def join(self, path: str) -> str:
        """Resolve a path against the study's folder."""
        file = FilePath(path)
        # no such user (~nobody): keep the path as it is
        with contextlib.suppress(RuntimeError):
            file = file.expanduser()
        return str(self._folder / file)
