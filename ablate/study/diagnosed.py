"""Checks of the ``diagnostics:`` section: the recipes of ``what_if`` make sense, quantise, and differ.

Whether they and ``layers`` fit the arms' models is for planning, which knows the layers of every model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.recipes import LayerRecipe, Recipe, SenselessRecipe, resolve
from ablate.study.tree import Mapping, Node, Scalar, Sequence, find, get

if TYPE_CHECKING:
    from ablate.study.messages import Faults
    from ablate.study.sections import StudyFile


def check_what_if(root: Mapping, file: StudyFile | None, faults: Faults) -> None:
    """Add a fault for each recipe of ``diagnostics.what_if`` that nothing could be measured of."""
    nodes = _items(root, "what_if")
    if file is None or file.diagnostics is None:
        return
    first: dict[Recipe, Node] = {}
    for node, spec in zip(nodes, file.diagnostics.what_if, strict=True):
        try:
            recipe = resolve(spec)
        except SenselessRecipe as error:
            faults.add(find(node, error.path)[0], str(error), error.hint)
            continue
        parts: list[LayerRecipe] = [recipe, *(rule.recipe for rule in recipe.rules)]
        parts += [phase.recipe for phase in recipe.phases]
        if all(policy.is_untouched for part in parts for _, _, policy in part.operands()):
            faults.add(node, "it quantises nothing, so that there is nothing to measure")
        elif (same := first.setdefault(recipe, node)) is not node:
            faults.add(node, f"the same recipe as {_shown(same)}")


def lines_of(root: Mapping, key: str) -> tuple[tuple[int, int], ...]:
    """Return line and column of each entry of ``layers`` or ``what_if``."""
    return tuple((item.line, item.column) for item in _items(root, key))


def _items(root: Mapping, key: str) -> tuple[Node, ...]:
    node = get(root, "diagnostics", key)
    return node.items if isinstance(node, Sequence) else ()


def _shown(node: Node) -> str:
    return f"'{node.value}'" if isinstance(node, Scalar) else f"what_if[{node.path[-1]}]"
