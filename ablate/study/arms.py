"""The arms of a study: built, checked, and folded where their configurations are equal.

Two equal named arms are a mistake. Equal cells of a grid are normal (without an FP4 GEMM the Hadamard size
has no effect): they are listed, and run once. An arm whose rules and phases change no layer equals the arm
without them.

How it fails: faults are added to the collector. Of an arm with a broken or circular chain of ``from`` only
its own values are checked.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from ablate.base.errors import likely
from ablate.data.identity import field_faults
from ablate.recipes import (
    GEMMS,
    SHORT_RECIPES,
    Recipe,
    SenselessRecipe,
    describe,
    read_recipe,
    resolve,
)
from ablate.recipes.place import phases_of
from ablate.run.architecture import model_places
from ablate.run.command import Command
from ablate.store.plan_file import DroppedCell
from ablate.study import checks
from ablate.study.checks import Misfit
from ablate.study.grid import expand
from ablate.study.parts import Part, Parts, Sections, factors_of, locate
from ablate.study.sections import SECTIONS, name_rule
from ablate.study.study import ResolvedArm

if TYPE_CHECKING:
    from pathlib import Path as FilePath

    from ablate.recipes import RecipeSpec
    from ablate.run.config import ModelConfig
    from ablate.study.faults import Faults
    from ablate.study.grid import Cell
    from ablate.study.parts import Built
    from ablate.study.source import Path

_NODES = Misfit(
    "nodes are those of a command",
    "devices_per_run may lie on several machines",
    ("resources.nodes",),
)
_CODE = Misfit(
    "code takes the place of a command's cwd, and no command trains here",
    "of a model or trainer in Python name the file: model: {function: DIR/model.py:build}",
    ("code",),
)
_NEEDED = (
    "model", "data", "training", "recipe", "recipe_spec", "backend", "resources",
)  # fmt: skip
_LABEL_HINT = "give the values labels: {label: value}"


class Arms:
    """The arms of one file. ``cells``: the grid's cells, each with the name of the arm that runs, or None.

    ``folded``: cells with the configuration of an arm, and its name.
    """

    def __init__(self, faults: Faults, folder: FilePath) -> None:
        self.arms: dict[str, ResolvedArm] = {}
        self.folded: dict[str, str] = {}
        self.dropped: list[DroppedCell] = []
        self.cells: list[tuple[Cell, str | None]] = []
        self.faults = faults
        self.sections = Sections(faults, folder)
        self._source = faults.source
        self._named = list(self._source.mapping("arms"))
        self._by_content: dict[tuple[str, ...], str] = {}
        self._is_size_used: dict[Path, bool] = defaultdict(bool)
        self.base = self._read_base()
        for name in self._named:
            own_parts = self._parts_at("arms", name)
            inherited = self._inherited(("arms", name, "from"), name)
            if inherited is None:
                self._check(Parts((own_parts,)))
            else:
                self._add(replace(inherited.under(*own_parts), arm=name))
        self._add_cells()
        for place, is_used in self._is_size_used.items():
            if not is_used:
                message = "expected a Hadamard in an arm with this size, got none"
                hint = "write stabiliser: rht or dht beside it, or leave it out"
                faults.add(place, message, hint)

    # ---- parts -----------------------------------------------------------------------------------------

    def _parts_at(self, *place: str) -> tuple[Part, ...]:
        """Return the sections that the file writes at a place, which is the base or an arm."""
        keys = self._source.mapping(*place)
        return tuple(Part((*place, key), (key,)) for key in keys if key in SECTIONS)

    def _read_base(self) -> Parts:
        """Check the base, and return its parts."""
        parts = self._parts_at("base")
        self._check(Parts((parts,)))
        budgets = self._source.get("search", "budgets")
        # the arms of a search are checked at its smallest budget
        if isinstance(budgets, list) and budgets:
            parts = (*parts, Part(("search", "budgets", 0), ("training", "tokens")))
        return Parts((parts,))

    def _check(self, parts: Parts) -> dict[str, Built]:
        return {section: self.sections.build(section, parts) for section in SECTIONS}

    def _inherited(self, place: Path, *chain: str) -> Parts | None:
        """Follow ``from`` at a place; None if it names no arm or leads back to one of ``chain``: a fault."""
        parent = self._source.get(*place)
        if not isinstance(parent, str):
            return self.base
        if parent not in self._named:
            message = f"no arm {self._source.got(place)} to inherit from"
            self.faults.add(place, message, likely(parent, self._named, None))
            return None
        if parent not in chain:
            parts = self._inherited(("arms", parent, "from"), *chain, parent)
            return parts and parts.under(*self._parts_at("arms", parent))
        if parent == chain[0] == min(chain, key=self._named.index):
            message = f"arms inherit in a circle: {' → '.join([*chain, parent])}"
            self.faults.add(("arms", parent, "from"), message)
        return None

    def _add_cells(self) -> None:
        inherited = self._inherited(("grid", "from"))
        for cell in expand(self.faults, self.sections):
            if inherited is None:
                return
            arm = None
            if cell.excluded:
                self.dropped.append(DroppedCell(name=cell.name, reason=cell.excluded))
            else:
                # a section before its fields
                levels = sorted(
                    (level.part for level in cell.levels),
                    key=lambda part: len(part.sets),
                )
                parts = inherited.under(*levels)
                arm = self._add(replace(parts, arm=cell.name, is_cell=True))
            self.cells.append((cell, arm))

    # ---- one arm ---------------------------------------------------------------------------------------

    def add_fault(self, parts: Parts, misfit: Misfit) -> None:
        """Add a fault at a field to blame that the file writes, else at the arm's recipe, else at the arm."""
        place = (
            locate(self._source, parts, *misfit.fields)
            or locate(self._source, parts, "recipe")
            or parts.home
        )
        arm = None if place[:2] == ("arms", parts.arm) else parts.arm
        self.faults.add(place, misfit.message, misfit.hint, arm=arm)

    def _build(self, parts: Parts) -> ResolvedArm | None:
        """Build and check an arm; None if it is dropped or cannot be built."""
        built = self._check(parts)
        config: dict[str, Any] = {section: built[section].value for section in SECTIONS}
        spec = config["recipe"]
        recipe = None if spec is None else _resolved(spec)
        if isinstance(recipe, SenselessRecipe):
            if self._drop_senseless(parts, recipe):
                return None
            recipe = None
        config |= {"recipe": recipe, "recipe_spec": spec}
        if "hadamard_size" in built["recipe"].written:
            self._note_hadamard_size(parts, recipe)
        misfits = _misfits(config, built)
        command = config["trainer"]
        code = config["code"]
        if code is not None and isinstance(command, Command):
            command = replace(command, cwd=self.sections.join(code))
            config["trainer"] = command
        elif code is not None:
            misfits.append(_CODE)
        config["trainer_spec"] = command
        if isinstance(command, Command) and recipe is not None:
            config["trainer"], more = checks.ready_command(command, recipe, built)
            misfits += more
        for misfit in misfits:
            self.add_fault(parts, misfit)
        if any(config[key] is None for key in _NEEDED):
            return None
        if not checks.can_be_listed(config["model"]):
            return None
        description = self._source.get("arms", parts.arm, "description")
        if parts.is_cell or not isinstance(description, str):
            description = None
        return ResolvedArm(
            name=parts.arm,
            description=description,
            factors=factors_of(self._source, parts),
            parts=parts,
            **config,
        )

    def _drop_senseless(self, parts: Parts, fault: SenselessRecipe) -> bool:
        """Drop a cell with a senseless recipe if the grid says so; else add the fault and return False."""
        hint = fault.hint
        if parts.is_cell:
            if self._source.get("grid", "senseless") == "drop":
                self.dropped.append(DroppedCell(name=parts.arm, reason=str(fault)))
                return True
            hint = "exclude the cell, or set grid.senseless: drop"
        keys = ["recipe", *map(str, fault.path)]
        while len(keys) > 1 and locate(self._source, parts, ".".join(keys)) is None:
            keys.pop()
        self.add_fault(parts, Misfit(str(fault), hint, (".".join(keys),)))
        return False

    def _note_hadamard_size(self, parts: Parts, recipe: Recipe | None) -> None:
        """Note whether the Hadamard size that the arm's recipe writes has a Hadamard in this arm."""
        place = locate(self._source, parts, "recipe.hadamard_size")
        assert place is not None
        self._is_size_used[place] |= recipe is None or any(
            policy.hadamard for policy in recipe.policies
        )

    # ---- named arms and cells --------------------------------------------------------------------------

    def _add(self, parts: Parts) -> str | None:
        """Add an arm, or fold a cell into an equal arm; return the name of the arm that runs, or None."""
        name = parts.arm
        arm = self._build(parts)
        rule = name_rule(name)
        if rule and not parts.is_cell:
            self.faults.add(parts.home, "cannot name an arm", rule)
        if arm is None:
            return None
        if rule and parts.is_cell:
            message = "the values make names that cannot name an arm"
            self.faults.add(parts.home, message, f"{rule}; {_LABEL_HINT}")
            return None
        if not parts.is_cell:
            self._check_recipe_name(arm)
        content = content_of(arm)
        same = self._by_content.get(content)
        # A fork that changes nothing is its parent.
        if arm.fork is not None and arm.fork.arm not in (name, same):
            content = (*content, arm.fork.arm, str(arm.fork.tokens))
            same = self._by_content.get(content)
        if same is None:
            if name in self.arms:
                message = f"two different arms would be called '{name}'"
                self.faults.add(parts.home, message, _LABEL_HINT)
                return None
            self.arms[name] = arm
            self._by_content[content] = name
            return name
        if parts.is_cell:
            self.folded[name] = same
        elif not self.faults.any_within("arms", name):
            # else it may differ in what cannot be read
            self.refuse_same(arm, same)
        return same

    def _check_recipe_name(self, arm: ResolvedArm) -> None:
        """Check that an arm with the name of a recipe has that recipe, unless it writes its own."""
        word = arm.name.lower()
        writes_recipe = "recipe" in self._source.mapping("arms", arm.name)
        if word not in SHORT_RECIPES or (writes_recipe and word != "bf16"):
            return
        # Rules may keep some layers in high precision, but bf16 must hold for all layers.
        recipes = arm.recipe.parts if word == "bf16" else (arm.recipe,)
        named = read_recipe(word)
        if all(
            recipe.gemm(gemm) == named.gemm(gemm)
            for recipe in recipes
            for gemm in GEMMS
        ):
            return
        message = f"expected the recipe that its name says, got {describe(arm.recipe)}"
        if not writes_recipe:
            message += ", which it inherits"
        hint = f"write {arm.name}: {{recipe: {word}}}, or take another name"
        self.faults.add(arm.parts.home, message, hint)

    def refuse_same(self, arm: ResolvedArm, same: str) -> None:
        """Add the fault that ``arm`` equals the arm named ``same``."""
        hint = "names, descriptions, resources and how logs are read do not count"
        self.faults.add(arm.parts.home, f"the same arm as '{same}'", hint)


def _misfits(config: dict[str, Any], built: dict[str, Built]) -> list[Misfit]:
    """List what does not fit in an arm whose sections may have faults; a section with one is None."""
    model, data, training = config["model"], config["data"], config["training"]
    resources, trainer = config["resources"], config["trainer"]
    recipe = config["recipe"]
    is_command = isinstance(trainer, Command)
    misfits: list[Misfit] = []
    if model is not None:
        misfits += checks.model_misfits(model, built["model"].written)
        if recipe is not None and not misfits and model.describes(trainer):
            misfits += checks.shape_misfits(model, recipe)
    if training is not None and not is_command:
        misfits += checks.budget_misfits(training, recipe)
        if resources is not None:
            misfits += checks.device_misfits(training, resources)
    if resources is not None:
        misfits += checks.share_misfits(resources, trainer)
        if resources.nodes > 1 and not is_command:
            misfits.append(_NODES)
    if data is not None and not is_command:
        for message, keys, hint in field_faults(data):
            misfits.append(Misfit(message, hint, tuple(f"data.{key}" for key in keys)))
    return misfits


@cache
def _resolved(spec: RecipeSpec) -> Recipe | SenselessRecipe:
    try:
        return resolve(spec)
    except SenselessRecipe as error:
        return error


@cache
def _without_idle_parts(model: ModelConfig, recipe: Recipe) -> Recipe:
    """Drop the rules and phases if they change no layer of the model at any time."""
    plain = replace(recipe, rules=(), phases=())
    for place in model_places(model).values():
        recipes = {phase.recipe for phase in phases_of(recipe, place)}
        if recipes != {phase.recipe for phase in phases_of(plain, place)}:
            return recipe
    return plain


def content_of(arm: ResolvedArm) -> tuple[str, ...]:
    """Return the values by which arms are compared; the fork is not among them."""
    recipe = arm.recipe
    if arm.model.describes(arm.trainer) and (recipe.rules or recipe.phases):
        recipe = _without_idle_parts(arm.model, recipe)
    trainer = arm.trainer or ""
    if isinstance(trainer, Command):
        unread = replace(trainer, metrics=None, expect=[], refuse=[], diverged=[])
        trainer = unread.text
    return (
        arm.backend,
        trainer,
        recipe.text,
        arm.model.text,
        arm.data.text,
        arm.training.text,
    )
