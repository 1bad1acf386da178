"""The front of a search as a study with fresh seeds, because the best of many single runs is partly luck."""

from __future__ import annotations

import io
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.recipes import RecipeSpec
    from ablate.search.plan import SearchPlan

SEEDS = 5
_LONGEST_NAME = 70


def confirm_study(found: SearchPlan, names: Sequence[str], source: str) -> str:
    """Return a study file that runs the baseline and these arms at the last budget.

    ``source``: the file of the search, named in the study file.
    """
    from ruamel.yaml import YAML

    arms = {arm.name: arm for arm in found.study.arms}
    baseline = found.plans[-1].arm(found.baseline)
    first = found.search.seed + 1
    config = baseline.config
    sections = {
        "model": config.model,
        "data": config.data,
        "training": config.training,
        "resources": baseline.resources,
    }
    base = {name: content for name, section in sections.items() if (content := _written(section))}
    if config.backend != "auto":
        base["backend"] = config.backend
    if config.trainer is not None:
        base["trainer"] = config.trainer
    target = found.plans[0].target
    content = {
        "name": f"{found.name[:_LONGEST_NAME]}-confirm",
        "description": f"The front of the search '{found.name}', run again with seeds that it has not seen: "
        "the best of many single runs is partly the luckiest.",
        "baseline": found.baseline,
        "target": {target.kind: target.value}
        | ({} if target.crossing == "confirmed" else {"crossing": target.crossing}),
        "seeds": list(range(first, first + SEEDS)),
        "base": base,
        "arms": {
            name: {"recipe": _recipe(arms[name].recipe_spec)}
            for name in dict.fromkeys([found.baseline, *names])
        },
    }
    yaml = YAML()
    yaml.width = 100
    yaml.indent(mapping=2, sequence=4, offset=2)
    text = io.StringIO()
    yaml.dump(content, text)
    written_by = f"# Written by `ablate search {source}`; `ablate run` of this file confirms what it found."
    return f"{written_by}\n{text.getvalue()}"


def _recipe(spec: RecipeSpec) -> Any:
    """Return a recipe in a study file's notation, as one word if that is enough."""
    content = _written(spec)
    if not content:
        return "bf16"
    return content["preset"] if set(content) == {"preset"} else content


def _written(section: Any) -> Any:
    """Return a section in a study file's notation, without default values."""
    if isinstance(section, list):
        return [_written(item) for item in section]
    if not is_dataclass(section) or isinstance(section, type):
        return section
    required = {"recipe": section.recipe} if hasattr(section, "recipe") else {}
    usual = type(section)(**required)
    content = {field.name: getattr(section, field.name) for field in fields(section)}
    return {
        name: _written(value)
        for name, value in content.items()
        if name in required or value != getattr(usual, name)
    }
