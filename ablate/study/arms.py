"""The arms of a study: built, checked, and folded where their configurations are equal.

Two equal named arms are a mistake. Equal cells of a grid are normal (without an FP4 GEMM the Hadamard size
has no effect): they are listed, and run once. Recipes are compared by the phases of each layer, so rules
and phases without effect do not make a new arm.

How it fails: faults are added to the collector. An arm with a broken or circular chain of ``from`` is not
checked any further.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from ablate.base.errors import likely
from ablate.data.identity import field_faults
from ablate.recipes import GEMMS, SHORT_RECIPES, Recipe, SenselessRecipe, describe, read_recipe, resolve
from ablate.recipes.place import phases_of
from ablate.run.architecture import model_places
from ablate.store.plan_file import DroppedCell
from ablate.study import checks
from ablate.study.checks import Misfit
from ablate.study.grid import expand, items
from ablate.study.layers import Sections, factors_of, locate
from ablate.study.sections import SECTIONS, name_rule
from ablate.study.source import KEY, get
from ablate.study.study import FoldedCell, ResolvedArm

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path as FilePath

    from ablate.recipes import Phase, RecipeSpec
    from ablate.run.config import ModelConfig
    from ablate.study.faults import Faults
    from ablate.study.grid import Cell
    from ablate.study.layers import Layer, Layers
    from ablate.study.source import Path


class Arms:
    """The arms of one file. ``cells``: those of the grid, with the names of their arms, None if dropped."""

    def __init__(self, faults: Faults, folder: FilePath) -> None:
        self.arms: dict[str, ResolvedArm] = {}
        self.folded: list[FoldedCell] = []
        self.dropped: list[DroppedCell] = []
        self.cells: list[tuple[Cell, str | None]] = []
        self.sections = Sections(faults.source, folder)
        self._faults, self._source = faults, faults.source
        self._written = dict(items(get(self._source.data, "arms")))
        self._chains: dict[str, Layers] = {}
        self._by_content: dict[tuple[str, ...], str] = {}
        self._rotates: dict[Path, bool] = {}
        base = self._stack(("base",))
        budgets = get(self._source.data, "search", "budgets")
        if isinstance(budgets, list) and budgets:  # the arms of a search are checked at its smallest budget
            base = (*base, (("search", "budgets", 0), ("training", "tokens")))
        self.base: Layers = (base,)

        for name in self._written:
            self._chain(name, ())
            self._parent(("arms", name, "from"))
        for name in self._written:
            if name in self._chains:
                self._add_named(name)
        if isinstance(get(self._source.data, "grid"), dict):
            self._add_cells()
        for at, is_used in self._rotates.items():
            if not is_used:
                hint = "write stabiliser: rht or dht beside it, or leave it out"
                faults.add(at, "expected a Hadamard in an arm with this size, got none", hint)

    # ---- inheritance -------------------------------------------------------------------------------------

    def _stack(self, where: Path) -> tuple[Layer, ...]:
        written = items(get(self._source.data, *where))
        return tuple(((*where, key), (key,)) for key, _ in written if key in SECTIONS)

    def _parent(self, at: Path) -> str | None:
        name = get(self._source.data, *at)
        if not isinstance(name, str):
            return None
        if name not in self._written:
            self._faults.add(
                at, f"no arm {self._source.got(at)} to inherit from", likely(name, self._written, None)
            )
        return name

    def _chain(self, name: str, trail: tuple[str, ...]) -> Layers | None:
        """Return an arm's layers; None if the chain is broken."""
        if name in self._chains or name not in self._written:
            return self._chains.get(name)
        if name in trail:
            circle = trail[trail.index(name) :]
            start = circle.index(min(circle, key=list(self._written).index))
            circle = (*circle[start:], *circle[: start + 1])
            self._faults.add(("arms", circle[0], "from"), f"arms inherit in a circle: {' → '.join(circle)}")
            return None
        source = get(self._written[name], "from")
        under = self._chain(source, (*trail, name)) if isinstance(source, str) else self.base
        if under is not None:
            self._chains[name] = (*under, self._stack(("arms", name)))
        return self._chains.get(name)

    # ---- one arm ---------------------------------------------------------------------------------------

    def add_fault(self, name: str, layers: Layers, misfit: Misfit) -> None:
        """Add a fault of an arm at the fields that are to blame; at its recipe if they are defaults."""
        place = locate(self._source, layers, *misfit.fields) or locate(self._source, layers, "recipe")
        where = _home(name, layers) if place is None else place[0]
        arm = None if where[:2] == ("arms", name) else name
        self._faults.add(where, misfit.what, misfit.hint, arm=arm)

    def _build(self, name: str, layers: Layers) -> ResolvedArm | None:
        """Build and check one arm; None if it is dropped or cannot be built."""
        built = {section: self.sections.build(section, layers) for section in SECTIONS}
        config = {section: found for section, (found, _) in built.items()}
        spec: RecipeSpec | None = config.pop("recipe")
        recipe = None if spec is None else _resolved(spec)
        if isinstance(recipe, SenselessRecipe):
            if _is_cell(layers) and get(self._source.data, "grid", "senseless") == "drop":
                self.dropped.append(DroppedCell(name=name, reason=str(recipe)))
                return None
            self._add_senseless(name, layers, recipe)
            recipe = None
        if "hadamard_size" in built["recipe"][1]:
            place = locate(self._source, layers, "recipe.hadamard_size")
            assert place is not None
            is_used = recipe is None or any(policy.hadamard for *_, policy in recipe.operands())
            self._rotates[place[0]] = self._rotates.get(place[0], False) or is_used
        for misfit in _misfits(config, recipe, built["model"][1]):
            self.add_fault(name, layers, misfit)
        optional = ("trainer", "fork")
        if spec is None or recipe is None:
            return None
        if any(found is None for section, found in config.items() if section not in optional):
            return None
        description = None if _is_cell(layers) else get(self._written[name], "description")
        return ResolvedArm(
            name=name,
            description=description if isinstance(description, str) else None,
            factors=factors_of(self._source, layers),
            recipe=recipe,
            recipe_spec=spec,
            layers=layers,
            **config,
        )

    def _add_senseless(self, name: str, layers: Layers, error: SenselessRecipe) -> None:
        hint = "exclude the cell, or set grid.senseless: drop" if _is_cell(layers) else error.hint
        parts = ("recipe", *map(str, error.path))
        ways = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
        found = [field for field in ways if locate(self._source, layers, field) is not None]
        self.add_fault(name, layers, Misfit(str(error), hint, tuple(found[:1])))

    # ---- named arms and cells --------------------------------------------------------------------------

    def _add_named(self, name: str) -> None:
        """Add a named arm; an arm equal to another is a fault."""
        if rule := name_rule(name):
            self._faults.add(("arms", name, KEY), "cannot name an arm", rule)
        arm = self._build(name, self._chains[name])
        if arm is None:
            return
        self._check_recipe_of_name(arm)
        same = self._by_content.setdefault(self._content(arm), name)
        if same == name:
            self.arms[name] = arm
        else:
            self.refuse_same(arm, same)

    def refuse_same(self, arm: ResolvedArm, same: str) -> None:
        """Add the fault of an arm that equals another."""
        hint = "names, descriptions and resources do not count"
        self._faults.add(_home(arm.name, arm.layers), f"the same arm as '{same}'", hint)

    def _check_recipe_of_name(self, arm: ResolvedArm) -> None:
        """Refuse an arm that has the name of a recipe and another recipe: any ``bf16``, else if inherited."""
        word, is_own = arm.name.lower(), "recipe" in (self._written[arm.name] or ())
        if word not in SHORT_RECIPES or (is_own and word != "bf16"):
            return
        # Rules that keep some layers in high precision belong to a base; in bf16 none may leave it.
        named, parts = read_recipe(word), arm.recipe.parts if word == "bf16" else (arm.recipe,)
        if all(part.gemm(gemm) == named.gemm(gemm) for part in parts for gemm in GEMMS):
            return
        got = f"{describe(arm.recipe)}{'' if is_own else ', which it inherits'}"
        hint = f"write {arm.name}: {{recipe: {word}}}, or take another name"
        self._faults.add(("arms", arm.name, KEY), f"expected the recipe that its name says, got {got}", hint)

    def _add_cells(self) -> None:
        cells = expand(self._faults)
        source = self._parent(("grid", "from"))
        under = self.base if source is None else self._chains.get(source)
        if under is not None:
            self.cells += [(cell, self._add_cell(cell, under)) for cell in cells]

    def _add_cell(self, cell: Cell, under: Layers) -> str | None:
        """Add a cell of the grid, folded into an equal arm if there is one; return the arm's name."""
        if cell.excluded:
            self.dropped.append(DroppedCell(name=cell.name, reason=cell.excluded))
            return None
        levels = sorted(
            cell.levels, key=lambda level: level.factor.count(".")
        )  # inner fields after outer ones
        own = tuple((level.where, tuple(level.factor.split("."))) for level in levels)
        arm = self._build(cell.name, (*under, own))
        if arm is None:
            return None
        at, hint = ("grid", "factors", KEY), "give the values labels: {label: value}"
        if rule := name_rule(arm.name):
            self._faults.add(at, "the values make names that cannot name an arm", f"{rule}; {hint}")
            return None
        content = self._content(arm)
        if content in self._by_content:
            self.folded.append(FoldedCell(name=arm.name, into=self._by_content[content]))
        elif arm.name in self.arms:
            self._faults.add(at, f"two different arms would be called '{arm.name}'", hint)
        else:
            self._by_content[content] = arm.name
            self.arms[arm.name] = arm
        return self._by_content.get(content)

    def _content(self, arm: ResolvedArm) -> tuple[str, ...]:
        content = content_of(arm)
        # A fork with its parent's recipe trains the same steps: it is its parent.
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


def _misfits(config: dict[str, Any], recipe: Recipe | None, given: dict[str, Any]) -> Iterable[Misfit]:
    """Yield what does not fit in the sections that could be built; ``given``: the model's keys."""
    model, data, training, resources = (config[name] for name in ("model", "data", "training", "resources"))
    of_model = [] if model is None else list(checks.model_misfits(model, given))
    yield from of_model
    if training is not None:
        yield from checks.budget_misfits(training, recipe)
        if resources is not None:
            yield from checks.device_misfits(training, resources)
    if data is not None:
        for what, keys, hint in field_faults(data):
            yield Misfit(what, hint, tuple(f"data.{key}" for key in keys))
    is_described = model is not None and not of_model and model.describes(config["trainer"])
    if is_described and recipe is not None:
        yield from checks.shape_misfits(model, recipe)


def content_of(arm: ResolvedArm) -> tuple[str, ...]:
    """Return what tells an arm from others, but for its fork."""
    recipe = arm.recipe.text
    if arm.model.describes(arm.trainer) and (arm.recipe.rules or arm.recipe.phases):
        recipe = _effect(arm.model, arm.recipe)
    parts = (arm.model, arm.data, arm.training)
    return (arm.backend, arm.trainer or "", recipe, *(part.text for part in parts))


@cache
def _effect(model: ModelConfig, recipe: Recipe) -> str:
    """Return the recipe without rules and phases if they have no effect in this model, else its phases."""
    plain = replace(recipe, rules=(), phases=())
    own, without = (
        str({name: _merged(phases_of(one, place)) for name, place in model_places(model).items()})
        for one in (recipe, plain)
    )
    return plain.text if own == without else f"{own} {recipe.deoscillate}"


def _merged(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """Drop phases that repeat the recipe of the phase before."""
    return tuple(phase for i, phase in enumerate(phases) if i == 0 or phase.recipe != phases[i - 1].recipe)
