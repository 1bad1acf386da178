"""The arms of a study: built, checked, and folded where their configurations are equal.

Two equal named arms are a mistake. Equal cells of a grid are normal (without an FP4 GEMM the Hadamard size
has no effect): they are listed, and run once. An arm whose rules and phases change no layer equals the arm
without them.

How it fails: faults are added to the collector. An arm with a broken or circular chain of ``from`` is not
checked any further.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from ablate.base.errors import likely
from ablate.data.identity import field_faults
from ablate.recipes import GEMMS, SHORT_RECIPES, Recipe, SenselessRecipe, describe, read_recipe, resolve
from ablate.recipes.place import phases_of
from ablate.run.architecture import model_places
from ablate.store.plan_file import DroppedCell
from ablate.study import checks
from ablate.study.checks import Misfit
from ablate.study.grid import expand
from ablate.study.layers import Sections, factors_of, locate
from ablate.study.sections import SECTIONS, name_rule
from ablate.study.source import KEY
from ablate.study.study import FoldedCell, ResolvedArm

if TYPE_CHECKING:
    from pathlib import Path as FilePath

    from ablate.recipes import RecipeSpec
    from ablate.run.config import ModelConfig
    from ablate.study.faults import Faults
    from ablate.study.grid import Cell
    from ablate.study.layers import Layer, Layers
    from ablate.study.source import Path


class Arms:
    """The arms of one file. ``cells``: the grid's cells, each with the name of the arm that runs, or None."""

    def __init__(self, faults: Faults, folder: FilePath) -> None:
        self.arms: dict[str, ResolvedArm] = {}
        self.folded: list[FoldedCell] = []
        self.dropped: list[DroppedCell] = []
        self.cells: list[tuple[Cell, str | None]] = []
        self.sections = Sections(faults.source, folder)
        self.faults, self._source = faults, faults.source
        self._written = dict(self._source.items("arms"))
        self._by_content: dict[tuple[str, ...], str] = {}
        self._rotates: dict[Path, bool] = {}
        base = self._stack("base")
        budgets = self._source.get("search", "budgets")
        if isinstance(budgets, list) and budgets:  # the arms of a search are checked at its smallest budget
            base = (*base, (("search", "budgets", 0), ("training", "tokens")))
        self.base: Layers = (base,)
        for name in self._written:
            if (under := self._inherited(("arms", name, "from"), name)) is not None:
                self._add(name, (*under, self._stack("arms", name)))
        self._add_cells()
        for at, is_used in self._rotates.items():
            if not is_used:
                hint = "write stabiliser: rht or dht beside it, or leave it out"
                faults.add(at, "expected a Hadamard in an arm with this size, got none", hint)

    def _stack(self, *where: str) -> tuple[Layer, ...]:
        written = self._source.items(*where)
        return tuple(((*where, key), (key,)) for key, _ in written if key in SECTIONS)

    def _inherited(self, at: Path, *chain: str) -> Layers | None:
        """Follow ``from`` at a place; None if it names no arm or leads back to one of ``chain``: a fault."""
        parent = self._source.get(*at)
        if not isinstance(parent, str):
            return self.base
        if parent not in self._written:
            what = f"no arm {self._source.got(at)} to inherit from"
            self.faults.add(at, what, likely(parent, self._written, None))
        elif parent not in chain:
            under = self._inherited(("arms", parent, "from"), *chain, parent)
            return under and (*under, self._stack("arms", parent))
        elif parent == chain[0] == min(chain, key=list(self._written).index):
            what = f"arms inherit in a circle: {' → '.join([*chain, parent])}"
            self.faults.add(("arms", parent, "from"), what)
        return None

    # ---- one arm ---------------------------------------------------------------------------------------

    def add_fault(self, name: str, layers: Layers, misfit: Misfit) -> None:
        """Add a fault at a field to blame that the file writes, else at the arm's recipe, else at the arm."""
        place = locate(self._source, layers, *misfit.fields) or locate(self._source, layers, "recipe")
        where = place or _home(name, layers)
        self.faults.add(where, misfit.what, misfit.hint, arm=name if where[0] != "arms" else None)

    def _build(self, name: str, layers: Layers) -> ResolvedArm | None:
        """None if the arm is dropped or cannot be built."""
        built = {section: self.sections.build(section, layers) for section in SECTIONS}
        config = {section: found for section, (found, _) in built.items()}
        spec: RecipeSpec | None = config.pop("recipe")
        recipe = None if spec is None else _resolved(spec)
        if isinstance(recipe, SenselessRecipe):
            if _is_cell(layers) and self._source.get("grid", "senseless") == "drop":
                self.dropped.append(DroppedCell(name=name, reason=str(recipe)))
                return None
            hint = "exclude the cell, or set grid.senseless: drop" if _is_cell(layers) else recipe.hint
            parts = ("recipe", *map(str, recipe.path))
            ways = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
            there = [field for field in ways if locate(self._source, layers, field) is not None]
            self.add_fault(name, layers, Misfit(str(recipe), hint, tuple(there[:1])))
            recipe = None
        if "hadamard_size" in built["recipe"][1]:
            place = locate(self._source, layers, "recipe.hadamard_size")
            assert place is not None
            is_used = recipe is None or any(policy.hadamard for *_, policy in recipe.operands())
            self._rotates[place] = self._rotates.get(place, False) or is_used
        model, data, training, resources = (config[key] for key in ("model", "data", "training", "resources"))
        misfits = [] if model is None else list(checks.model_misfits(model, built["model"][1]))
        if recipe is not None and model is not None and not misfits and model.describes(config["trainer"]):
            misfits += checks.shape_misfits(model, recipe)
        if training is not None:
            misfits += checks.budget_misfits(training, recipe)
            misfits += [] if resources is None else checks.device_misfits(training, resources)
        for what, keys, hint in () if data is None else field_faults(data):
            misfits.append(Misfit(what, hint, tuple(f"data.{key}" for key in keys)))
        for misfit in misfits:
            self.add_fault(name, layers, misfit)
        if spec is None or recipe is None or None in (model, data, training, resources, config["backend"]):
            return None
        description = None if _is_cell(layers) else self._source.get("arms", name, "description")
        return ResolvedArm(
            name=name,
            description=description if isinstance(description, str) else None,
            factors=factors_of(self._source, layers),
            recipe=recipe,
            recipe_spec=spec,
            layers=layers,
            **config,
        )

    # ---- named arms and cells --------------------------------------------------------------------------

    def _add(self, name: str, layers: Layers) -> str | None:
        """Add an arm, or fold a cell into an equal arm; return the name of the arm that runs, or None."""
        is_cell, at = _is_cell(layers), _home(name, layers)
        arm = self._build(name, layers)
        label = "give the values labels: {label: value}"
        if (rule := name_rule(name)) and (arm is not None or not is_cell):
            what, hint = "cannot name an arm", f"{rule}; {label}" if is_cell else rule
            self.faults.add(at, f"the values make names that {what}" if is_cell else what, hint)
        if arm is None or (rule and is_cell):
            return None
        if not is_cell:
            self._check_recipe_of_name(arm)
        content = self._content(arm)
        if (same := self._by_content.get(content)) is None:
            if name in self.arms:
                self.faults.add(at, f"two different arms would be called '{name}'", label)
                return None
            self.arms[name], self._by_content[content] = arm, name
        elif is_cell:
            self.folded.append(FoldedCell(name=name, into=same))
        else:
            self.refuse_same(arm, same)
        return self._by_content[content]

    def refuse_same(self, arm: ResolvedArm, same: str) -> None:
        """Add the fault that ``arm`` equals the arm named ``same``."""
        hint = "names, descriptions and resources do not count"
        self.faults.add(_home(arm.name, arm.layers), f"the same arm as '{same}'", hint)

    def _check_recipe_of_name(self, arm: ResolvedArm) -> None:
        """Refuse an arm named like a recipe if it inherits another, or is ``bf16`` and sets another."""
        word, is_own = arm.name.lower(), "recipe" in dict(self._source.items("arms", arm.name))
        if word not in SHORT_RECIPES or (is_own and word != "bf16"):
            return
        # Under any other name, rules may keep some layers in high precision; bf16 must hold for all layers.
        named, parts = read_recipe(word), arm.recipe.parts if word == "bf16" else (arm.recipe,)
        if all(part.gemm(gemm) == named.gemm(gemm) for part in parts for gemm in GEMMS):
            return
        got = f"{describe(arm.recipe)}{'' if is_own else ', which it inherits'}"
        hint = f"write {arm.name}: {{recipe: {word}}}, or take another name"
        self.faults.add(("arms", arm.name, KEY), f"expected the recipe that its name says, got {got}", hint)

    def _add_cells(self) -> None:
        under = self._inherited(("grid", "from"))
        for cell in expand(self.faults):
            if under is None:
                return
            if cell.excluded:
                self.dropped.append(DroppedCell(name=cell.name, reason=cell.excluded))
                self.cells.append((cell, None))
                continue
            outer_first = sorted(cell.levels, key=lambda level: len(level.path))
            own = tuple((level.where, level.path) for level in outer_first)
            self.cells.append((cell, self._add(cell.name, (*under, own))))

    def _content(self, arm: ResolvedArm) -> tuple[str, ...]:
        content = content_of(arm)
        # A fork that changes nothing is its parent.
        if arm.fork is None or arm.fork.arm in (arm.name, self._by_content.get(content)):
            return content
        return (*content, arm.fork.arm, str(arm.fork.tokens))


def _is_cell(layers: Layers) -> bool:
    return layers[-1] != () and layers[-1][0][0][0] == "grid"


def _home(name: str, layers: Layers) -> Path:
    return ("grid", "factors", KEY) if _is_cell(layers) else ("arms", name, KEY)


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
        if {one.recipe for one in phases_of(recipe, place)} != {
            one.recipe for one in phases_of(plain, place)
        }:
            return recipe
    return plain


def content_of(arm: ResolvedArm) -> tuple[str, ...]:
    """Return the values by which arms are compared; the fork is not among them."""
    recipe = arm.recipe
    if arm.model.describes(arm.trainer) and (recipe.rules or recipe.phases):
        recipe = _without_idle_parts(arm.model, recipe)
    parts = (recipe, arm.model, arm.data, arm.training)
    return (arm.backend, arm.trainer or "", *(part.text for part in parts))
