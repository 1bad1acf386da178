"""The arms of a study: built, checked, and folded where their configurations are equal.

Two equal named arms are a mistake. Equal cells of a grid are normal (without an FP4 GEMM the Hadamard size
has no effect): they are listed, and run once. An arm whose rules and phases change no layer equals the arm
without them.

``fork:`` starts an arm from another's state. Costs count from the fork, so the baseline must have the same
state there: it is the parent, or it forks from the same parent at the same place.

How it fails: faults are added to the collector. An arm with a broken or circular chain of ``from`` is not
checked any further.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from typing import TYPE_CHECKING

from ablate.base.errors import likely
from ablate.data.identity import field_faults
from ablate.recipes import GEMMS, SHORT_RECIPES, Recipe, SenselessRecipe, describe, read_recipe, resolve
from ablate.recipes.place import phases_of
from ablate.run.architecture import model_places
from ablate.run.command import Command
from ablate.run.schedule import plan_steps
from ablate.store.plan_file import DroppedCell, ForkPoint
from ablate.study import checks
from ablate.study.checks import Misfit
from ablate.study.grid import expand
from ablate.study.layers import Sections, factors_of, locate
from ablate.study.sections import SECTIONS, name_rule
from ablate.study.source import KEY
from ablate.study.study import ResolvedArm

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path as FilePath

    from ablate.recipes import RecipeSpec
    from ablate.run.config import ModelConfig
    from ablate.study.faults import Faults
    from ablate.study.grid import Cell
    from ablate.study.layers import Layer, Layers
    from ablate.study.source import Path, Source


class Arms:
    """The arms of one file. ``cells``: the grid's cells, each with the name of the arm that runs, or None.

    ``folded``: cells with the configuration of an arm, and its name.
    """

    def __init__(self, faults: Faults, folder: FilePath) -> None:
        self.arms: dict[str, ResolvedArm] = {}
        self.folded: dict[str, str] = {}
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
        under = self._inherited(("grid", "from"))
        for cell in expand(faults):
            if under is None:
                break
            if cell.excluded:
                self.dropped.append(DroppedCell(name=cell.name, reason=cell.excluded))
                self.cells.append((cell, None))
                continue
            own = ((level.where, tuple(level.factor.split("."))) for level in cell.levels)
            outer_first = tuple(sorted(own, key=lambda layer: len(layer[1])))
            self.cells.append((cell, self._add(cell.name, (*under, outer_first))))
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
        arm = None if where[:2] == ("arms", name) else name
        self.faults.add(where, misfit.what, misfit.hint, arm=arm)

    def _build(self, name: str, layers: Layers) -> ResolvedArm | None:
        """None if the arm is dropped or cannot be built."""
        built = {section: self.sections.build(section, layers) for section in SECTIONS}
        config = {section: found for section, (found, _) in built.items()}
        spec: RecipeSpec | None = config.pop("recipe")
        recipe = None if spec is None else _resolved(spec)
        if isinstance(recipe, SenselessRecipe):
            hint = recipe.hint
            if _is_cell(layers):
                hint = "exclude the cell, or set grid.senseless: drop"
                if self._source.get("grid", "senseless") == "drop":
                    self.dropped.append(DroppedCell(name=name, reason=str(recipe)))
                    return None
            parts = ["recipe", *map(str, recipe.path)]
            while len(parts) > 1 and locate(self._source, layers, ".".join(parts)) is None:
                parts.pop()
            self.add_fault(name, layers, Misfit(str(recipe), hint, (".".join(parts),)))
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
        if training is not None and not isinstance(config["trainer"], Command):
            misfits += checks.budget_misfits(training, recipe)
            misfits += [] if resources is None else checks.device_misfits(training, resources)
        if resources is not None:
            misfits += checks.share_misfits(resources, config["trainer"])
        command = config["trainer"]
        if isinstance(command, Command) and recipe is not None and None not in (training, resources):
            command, faults = checks.ready_command(command, recipe, training, resources, built)
            config["trainer"], misfits = command, misfits + faults
        elif resources is not None and resources.nodes > 1:
            hint = "devices_per_run may lie on several machines"
            misfits.append(Misfit("nodes are those of a command", hint, ("resources.nodes",)))
        for what, keys, hint in () if data is None or isinstance(command, Command) else field_faults(data):
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
        word, is_own = name.lower(), not is_cell and "recipe" in dict(self._source.items("arms", name))
        if not is_cell and word in SHORT_RECIPES and (word == "bf16" or not is_own):
            # Rules may keep some layers in high precision, but bf16 must hold for all layers.
            named, of = read_recipe(word), arm.recipe.parts if word == "bf16" else (arm.recipe,)
            if any(part.gemm(gemm) != named.gemm(gemm) for part in of for gemm in GEMMS):
                got = f"{describe(arm.recipe)}{'' if is_own else ', which it inherits'}"
                hint = f"write {name}: {{recipe: {word}}}, or take another name"
                self.faults.add(at, f"expected the recipe that its name says, got {got}", hint)
        content = content_of(arm)
        # A fork that changes nothing is its parent.
        if arm.fork is not None and arm.fork.arm not in (name, self._by_content.get(content)):
            content = (*content, arm.fork.arm, str(arm.fork.tokens))
        if (same := self._by_content.get(content)) is None:
            if name in self.arms:
                self.faults.add(at, f"two different arms would be called '{name}'", label)
                return None
            self.arms[name], self._by_content[content] = arm, name
        elif is_cell:
            self.folded[name] = same
        elif not self.faults.any_within("arms", name):  # else it may differ in what cannot be read
            self.refuse_same(arm, same)
        return self._by_content[content]

    def refuse_same(self, arm: ResolvedArm, same: str) -> None:
        """Add the fault that ``arm`` equals the arm named ``same``."""
        hint = "names, descriptions and resources do not count"
        self.faults.add(_home(arm.name, arm.layers), f"the same arm as '{same}'", hint)


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
    changes = any(
        {one.recipe for one in phases_of(recipe, place)} != {one.recipe for one in phases_of(plain, place)}
        for place in model_places(model).values()
    )
    return recipe if changes else plain


def content_of(arm: ResolvedArm) -> tuple[str, ...]:
    """Return the values by which arms are compared; the fork is not among them."""
    recipe = arm.recipe
    if arm.model.describes(arm.trainer) and (recipe.rules or recipe.phases):
        recipe = _without_idle_parts(arm.model, recipe)
    parts = (recipe, arm.model, arm.data, arm.training)
    trainer = arm.trainer.text if isinstance(arm.trainer, Command) else arm.trainer or ""
    return (arm.backend, trainer, *(part.text for part in parts))


# ---- forks -------------------------------------------------------------------------------------------------


_KEPT = (
    "seq_len", "batch_size", "eval_tokens", "eval_windows", "evaluate_in", "master_weights", "reduction",
    "compile",
)  # fmt: skip
"""Fields of training that belong to the state, the order of the data or what is evaluated."""


def resolve_forks(found: Arms, names: Collection[str], baseline: str) -> None:
    """Check the forks, and replace each by the parent that runs and a start in whole steps.

    ``names``: of all arms in the file, also of those with faults. A fork from itself, by inheritance, is
    removed.
    """
    written, faults, source = dict(found.arms), found.faults, found.faults.source
    forks = {}
    for name, arm in written.items():
        if arm.fork is not None:
            step = plan_steps(arm.training).tokens_per_step
            tokens = max(1, round(arm.fork.tokens / step)) * step
            forks[name] = ForkPoint(arm=found.folded.get(arm.fork.arm, arm.fork.arm), tokens=tokens)
    for name, fork in forks.items():
        arm, parent = written[name], written.get(fork.arm)
        misfit = next(_misfits(arm, parent, forks, names, source), None)
        if misfit is not None:
            found.add_fault(name, arm.layers, misfit)
        elif parent is not None and content_of(arm) == content_of(parent) and parent is not arm:
            found.refuse_same(arm, fork.arm)  # ``Arms`` sees it only if the parent comes first in the file
        # A fork from itself, by inheritance, is no fork.
        found.arms[name] = replace(arm, fork=fork if misfit is None and fork.arm != name else None)
    if not forks or faults:
        return
    if source.get("tune") is not None:
        hint = "tune them in a study of their own"
        faults.add(("tune",), "a study with forks cannot tune its arms", hint)
    base = found.arms[baseline]
    for arm in found.arms.values():
        if arm is base or arm.fork == base.fork or (base.fork is not None and base.fork.arm == arm.name):
            continue
        if base.fork is not None or (arm.fork is not None and arm.fork.arm != base.name):
            what = f"the baseline '{base.name}' does not pass through the place where this arm begins"
            hint = "costs count from one place: fork both from one arm after as many tokens"
            found.add_fault(arm.name, arm.layers, Misfit(what, hint, ("fork.from", "fork")))


def check_replays(found: Arms, baseline: str) -> None:
    """Check the arms that replay the baseline's routes: they differ from it in the recipe alone."""
    if (base := found.arms.get(baseline)) is None:
        return
    for name, arm in found.arms.items():
        if arm.model.routing != "replay":
            continue
        learned = replace(arm, model=replace(arm.model, routing="learned"))
        kept = ("model", "data", "training", "backend", "trainer", "fork")
        odd = [key for key in kept if getattr(learned, key) != getattr(base, key)]
        faults = {
            "the baseline replays nobody's routes": arm is base,
            f"the baseline '{baseline}' has another {'/'.join(odd)}": odd,
            "a trainer of your own replays no routes": arm.trainer,
            "a run on several devices replays no routes": arm.resources.devices_per_run > 1,
            "the baseline trains on several devices, without a record": base.resources.devices_per_run > 1,
            "a study that tunes replays no routes": found.faults.source.get("tune") is not None,
        }
        what = next((what for what, is_so in faults.items() if is_so), None)
        if what is not None:
            hint = "replay takes the baseline's experts in another recipe, all else equal"
            found.add_fault(name, arm.layers, Misfit(what, hint, ("model.routing",)))


def _misfits(
    arm: ResolvedArm,
    parent: ResolvedArm | None,
    forks: dict[str, ForkPoint],
    names: Collection[str],
    source: Source,
) -> Iterator[Misfit]:
    for key, meaning in (("from", "the arm that it leaves"), ("at", "after how many tokens")):
        if locate(source, arm.layers, f"fork.{key}") is None:
            yield Misfit(f"missing key '{key}'", meaning, ("fork",))
    name, tokens = forks[arm.name].arm, forks[arm.name].tokens
    if parent is None:
        if name not in names:  # otherwise it has faults of its own
            yield Misfit(f"no arm '{name}' to fork from", likely(name, names, None), ("fork.from",))
    elif parent is arm:
        place = locate(source, arm.layers, "fork.from")
        if place is not None and place[:2] == ("arms", name):
            yield Misfit("an arm cannot fork from itself", None, ("fork.from",))
    else:
        if name in forks and (other := forks[name].arm) != name:
            hint = "an arm that others fork from is trained from its beginning"
            yield Misfit(f"'{name}' itself forks from '{other}'", hint, ("fork.from",))
        if arm.trainer is not None or parent.trainer is not None:
            what = "a training function of your own cannot fork"
            yield Misfit(what, "its state is not known", ("trainer", "fork"))
        pairs = [("backend", arm.backend, parent.backend)]
        for part in ("model", "data", "training"):
            own, others = getattr(arm, part), getattr(parent, part)
            keys = _KEPT if part == "training" else [field.name for field in fields(own)]
            pairs += [(f"{part}.{key}", getattr(own, key), getattr(others, key)) for key in keys]
        for path, mine, theirs in pairs:
            if mine != theirs:
                what = f"{path.rpartition('.')[2]} {mine} cannot go on from '{name}', which has {theirs}"
                yield Misfit(what, "a fork continues the same state and data", (path, "fork"))
        for one in (arm, parent):
            if tokens >= (budget := plan_steps(one.training).tokens):
                what = f"a fork after {tokens} tokens, but '{one.name}' trains {budget} tokens"
                yield Misfit(what, "both in whole steps; fork before the end", ("fork.at",))
