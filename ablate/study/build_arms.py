"""From drafts to arms: build each, check it, and fold arms with equal configurations.

Two equal named arms are a mistake. Equal cells of a grid are normal (without an FP4 GEMM the Hadamard size
has no effect): they are listed, and run once. Recipes are compared by the phases of each layer, so rules
and phases without effect do not make a new arm.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from ablate.recipes import GEMMS, SHORT_RECIPES, SenselessRecipe, describe, read_recipe
from ablate.recipes.place import phases_of
from ablate.run.architecture import model_places
from ablate.store.plan_file import DroppedCell
from ablate.study.checks import ArmChecks
from ablate.study.merge import SectionBuilder
from ablate.study.sections import SECTIONS
from ablate.study.shape_checks import Fit
from ablate.study.study import FoldedCell, ResolvedArm
from ablate.study.tree import get

if TYPE_CHECKING:
    from pathlib import Path

    from ablate.recipes import Phase, Recipe
    from ablate.run.config import ModelConfig
    from ablate.study.grid import Cell
    from ablate.study.merge import Draft
    from ablate.study.messages import Faults
    from ablate.study.tree import Node

MAX_NAME = 80


def name_rule(name: str) -> str | None:
    """Return the rule for names if this one breaks it, else None."""
    is_good = name.isprintable() and name == name.strip() and 0 < len(name) <= MAX_NAME
    return None if is_good else f"1 to {MAX_NAME} printable characters, no space around"


class ArmCollector:
    """Collects the arms of one study. ``drop_senseless``: the grid's setting for senseless cells."""

    def __init__(self, folder: Path, faults: Faults, *, drop_senseless: bool) -> None:
        self.arms: dict[str, ResolvedArm] = {}
        self.folded: list[FoldedCell] = []
        self.dropped: list[DroppedCell] = []
        self.builder = SectionBuilder(folder)
        self._faults = faults
        self._drop_senseless = drop_senseless
        self._by_content: dict[tuple[str, ...], str] = {}
        self._rotates: dict[Node, bool] = {}
        self._effect = cache(_effect)
        self._fit = Fit()

    def add_named(self, draft: Draft) -> None:
        """Add a named arm; an arm equal to another is a fault."""
        if rule := name_rule(draft.name):
            self._faults.add(draft.node, "cannot name an arm", rule)
        arm = self._build(draft, is_cell=False)
        if arm is None:
            return
        self._check_recipe_of_name(draft, arm)
        same = self._by_content.setdefault(self._content(arm), arm.name)
        if same != arm.name:
            self.refuse_same(draft, same)
            return
        self.arms[arm.name] = arm

    def refuse_same(self, draft: Draft, same: str) -> None:
        """Add the fault of an arm that equals another."""
        hint = "names, descriptions and resources do not count"
        self._faults.add(draft.node, f"the same arm as '{same}'", hint)

    def _check_recipe_of_name(self, draft: Draft, arm: ResolvedArm) -> None:
        """Refuse an arm that has the name of a recipe and another recipe: any ``bf16``, else if inherited."""
        word, written = draft.name.lower(), draft.sections.get("recipe")
        is_own = written is not None and written.path[:2] == ("arms", draft.name)
        if word not in SHORT_RECIPES or (is_own and word != "bf16"):
            return
        # Rules that keep some layers in high precision belong to a base; in bf16 none may leave it.
        named, parts = read_recipe(word), arm.recipe.parts if word == "bf16" else (arm.recipe,)
        if all(part.gemm(gemm) == named.gemm(gemm) for part in parts for gemm in GEMMS):
            return
        got = f"{describe(arm.recipe)}{'' if is_own else ', which it inherits'}"
        hint = f"write {draft.name}: {{recipe: {word}}}, or take another name"
        self._faults.add(draft.node, f"expected the recipe that its name says, got {got}", hint)

    def refuse_idle_sizes(self) -> None:
        """Refuse each ``hadamard_size`` that no arm with a Hadamard has; not every arm need have one."""
        for node, is_used in self._rotates.items():
            if not is_used:
                hint = "write stabiliser: rht or dht beside it, or leave it out"
                self._faults.add(node, "expected a Hadamard in an arm with this size, got none", hint)

    def add_cell(self, cell: Cell, draft: Draft) -> str | None:
        """Add a cell of the grid, folded into an equal arm if there is one; return the arm's name."""
        if cell.excluded:
            self.dropped.append(DroppedCell(name=cell.name, reason=cell.excluded))
            return None
        arm = self._build(draft, is_cell=True)
        if arm is None:
            return None
        hint = "give the values labels: {label: value}"
        if rule := name_rule(arm.name):
            self._faults.add(draft.node, "the values make names that cannot name an arm", f"{rule}; {hint}")
            return None
        content = self._content(arm)
        if content in self._by_content:
            self.folded.append(FoldedCell(name=arm.name, into=self._by_content[content]))
        elif arm.name in self.arms:
            self._faults.add(draft.node, f"two different arms would be called '{arm.name}'", hint)
        else:
            self._by_content[content] = arm.name
            self.arms[arm.name] = arm
        return self._by_content.get(content)

    def _build(self, draft: Draft, *, is_cell: bool) -> ResolvedArm | None:
        """Build and check one arm; None if it is dropped or cannot be built."""
        built = {section: self.builder.build(section, draft.sections.get(section)) for section in SECTIONS}
        spec = built.pop("recipe")
        checks = ArmChecks(draft, self._faults, self._fit)
        recipe: Recipe | None = None
        if spec is not None:
            resolved = self.builder.recipe(spec)
            if not isinstance(resolved, SenselessRecipe):
                recipe = resolved
            elif is_cell and self._drop_senseless:
                self.dropped.append(DroppedCell(name=draft.name, reason=str(resolved)))
                return None
            else:
                checks.senseless(resolved)
        if (size := get(draft.sections.get("recipe"), "hadamard_size")) is not None:
            is_used = recipe is None or any(policy.hadamard for *_, policy in recipe.operands())
            self._rotates[size] = self._rotates.get(size, False) or is_used
        checks.arm(built, recipe)
        optional = ("trainer", "fork")
        if recipe is None or any(value is None for name, value in built.items() if name not in optional):
            return None
        return ResolvedArm(
            name=draft.name,
            description=draft.description,
            factors=dict(draft.factors),
            recipe=recipe,
            recipe_spec=spec,
            lines=checks.lines(),
            **built,
        )

    def content(self, arm: ResolvedArm) -> tuple[str, ...]:
        """Return what tells an arm from others, but for its fork."""
        recipe = arm.recipe.text
        if arm.model.describes(arm.trainer) and (arm.recipe.rules or arm.recipe.phases):
            recipe = self._effect(arm.model, arm.recipe)
        parts = (arm.model, arm.data, arm.training)
        return (arm.backend, arm.trainer or "", recipe, *(part.text for part in parts))

    def _content(self, arm: ResolvedArm) -> tuple[str, ...]:
        content = self.content(arm)
        # A fork with its parent's recipe trains the same steps: it is its parent.
        if arm.fork is None or arm.fork.arm in (arm.name, self._by_content.get(content)):
            return content
        return (*content, arm.fork.arm, str(arm.fork.tokens))


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
