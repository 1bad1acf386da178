"""The sections of a study file that search: ``tune:`` (each arm's own rates) and ``search:`` (recipes).

**Tune**: the fields that each arm may set for itself before the seeds run, and the budget. Every value that
the search may try must be valid for every arm, at the trials' budget and at the arm's own; the arms' checks
therefore run at the lowest and the highest values. A field that would change what is compared (the batch, the
evaluation, the budget) is refused.

**Search**: recipes are compared at equal data, model and training, so its arms and factors set recipes alone.
Its budgets replace ``training.tokens``; the arms are checked at the first budget, which is the smallest.

How it fails: each fault is added at its place.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ablate.base.errors import likely
from ablate.run.config import TrainingConfig
from ablate.store.plan_file import GroupTuning
from ablate.study import checks
from ablate.study.arms import content_of
from ablate.study.faults import children
from ablate.study.parts import Part
from ablate.study.search_space import Choices, Range, Search, Tune, tuned_name
from ablate.study.sections import (
    MAX_TRIALS,
    SECTIONS,
    RangeSection,
    StudyFile,
    TuneSection,
)
from ablate.study.source import KEY
from ablate.study.study import shared_fields

if TYPE_CHECKING:
    from ablate.study.arms import Arms
    from ablate.study.faults import Faults
    from ablate.study.search_space import Space
    from ablate.study.source import Path

FIRST_TRIAL_SEED = 1_000_000
"""Far from the seeds that people choose: a study that gets more seeds keeps its tuned values."""
_KEYS_OF_A_SEARCH = (
    "name",
    "description",
    "baseline",
    "target",
    "waive",
    "base",
    "arms",
    "grid",
    "search",
)


# ---- tune ---------------------------------------------------------------------------------------------


def check_tune(file: StudyFile, arms: Arms) -> Tune | None:
    """Check and build the study's ``tune``; None if it has none or the section has a fault."""
    section = file.tune
    faults = arms.faults
    if section is None:
        return None
    fields = {
        name: _values(name, values, arms) for name, values in section.fields.items()
    }
    trials = section.trials or 0
    if not faults.any_within("tune"):
        trials = _num_trials(section, fields, faults)
    members_of = _groups(arms, section)
    if faults.any_within("tune"):
        return None
    untuned = {}
    for name, arm in arms.arms.items():
        untuned[name] = {field: getattr(arm.training, field) for field in fields}
    _check_arms(fields, untuned, arms)
    groups = []
    for name, (first, *others) in members_of.items():
        for member in others:
            if untuned[member] != untuned[first]:
                message = f"arms '{first}' and '{member}' of one group start from other values"
                hint = "give each a group of its own"
                faults.add(("tune", "groups", name), message, hint)
                break
        group = GroupTuning(
            name=name,
            arms=(first, *others),
            shared=untuned[first],
            trials=(),
            chosen=None,
        )
        groups.append(group)
    _check_budget(section, arms)
    used = list(file.every_seed)
    if file.baseline_again:
        used += range(max(used) + 1, max(used) + 1 + len(used))
    free_seeds = (
        seed for seed in itertools.count(FIRST_TRIAL_SEED) if seed not in used
    )
    content = shared_fields(Tune, section) | {
        "fields": fields,
        "trials": trials,
        "seeds": tuple(itertools.islice(free_seeds, section.seeds)),
        "groups": tuple(groups),
    }
    return Tune(
        **content,
        study=f"{file.name} tune",
        done=False,
        budget=section.tokens,
        tuned={},
    )


def _num_trials(section: TuneSection, fields: Space, faults: Faults) -> int:
    """Return the trials of a group; those of a grid are all combinations."""
    combinations = math.prod(field.count for field in fields.values())
    if section.sampler == "grid":
        if combinations > MAX_TRIALS:
            message = f"the grid has {combinations:.0f} combinations"
            faults.add(("tune", "fields", KEY), message, f"at most {MAX_TRIALS}")
        return int(combinations)
    trials = section.trials or 0
    if trials > combinations:
        message = f"{trials} trials, but only {combinations:.0f} combinations"
        hint = "or sampler: grid, which takes every one once"
        faults.add(("tune", "trials"), message, hint)
    return trials


def _values(name: str, values: RangeSection | list[Any], arms: Arms) -> Range | Choices:
    faults = arms.faults
    place: Path = ("tune", "fields", name)
    keys = ("low", "high") if isinstance(values, RangeSection) else range(len(values))
    for key in keys:
        arms.sections.check(Part((*place, key), ("training", name)))
    if isinstance(values, RangeSection):
        return Range(**vars(values), whole=name in ("warmup_tokens", "decay_tokens"))
    for index, value in enumerate(values):
        if value in values[:index]:
            got = faults.source.got((*place, index))
            faults.add((*place, index), f"value {got} given twice")
    if len(values) < 2:
        message = "expected at least two values"
        faults.add(place, message, "one value belongs in base.training")
    return Choices(values=tuple(values))


def _groups(arms: Arms, section: TuneSection) -> dict[str, tuple[str, ...]]:
    """Return each group's arms in the order of the study; an arm that no group names has its own."""
    faults = arms.faults
    group_of: dict[str, str] = {}
    for name, members in section.groups.items():
        for index, member in enumerate(members):
            place = ("tune", "groups", name, index)
            arm = arms.folded.get(member, member)
            if arm not in arms.arms:
                hint = likely(arm, arms.arms, f"arms: {', '.join(list(arms.arms)[:8])}")
                faults.add(place, f"no arm '{member}'", hint)
            elif group_of.setdefault(arm, name) != name:
                message = f"arm '{arm}' is in a group already"
                faults.add(place, message, f"'{group_of[arm]}'")
    for name in section.groups:
        if name in arms.arms and group_of.get(name) != name:
            message = f"an arm that is not in it is called '{name}', too"
            faults.add(("tune", "groups", name, KEY), message)
    groups: dict[str, tuple[str, ...]] = {}
    for arm in arms.arms:
        name = group_of.get(arm, arm)
        groups[name] = (*groups.get(name, ()), arm)
    return groups


def _check_arms(fields: Space, untuned: dict[str, dict[str, Any]], arms: Arms) -> None:
    """Check that tuned names are free, that arms' own values may be tried, and that arms differ otherwise."""
    faults = arms.faults
    defaults = {name: getattr(TrainingConfig(), name) for name in fields}
    first: dict[tuple[str, ...], str] = {}
    for arm in arms.arms.values():
        name = tuned_name(arm.name)
        if name in arms.arms:
            hint = f"'{arm.name}' at the values found for it takes that name"
            faults.add(("tune",), f"an arm of the name '{name}' is there already", hint)
        for field, value in untuned[arm.name].items():
            if value not in fields[field]:
                message = f"the study's own {field}, {value}, is not among the values"
                hint = "it is always tried, so that tuning can only gain"
                faults.add(("tune", "fields", field), message, hint, arm=arm.name)
        content = content_of(replace(arm, training=replace(arm.training, **defaults)))
        same = first.setdefault(content, arm.name)
        if same != arm.name:
            message = (
                f"arms '{same}' and '{arm.name}' differ in nothing but what is tuned"
            )
            faults.add(("tune", "fields", KEY), message, "tuned, they would be one arm")


def _check_budget(section: TuneSection, arms: Arms) -> None:
    """Check every arm at the trials' budget with the lowest and with the highest values."""
    for arm in arms.arms.values():
        if section.tokens > arm.training.tokens:
            message = f"{section.tokens} tokens a trial exceed the {arm.training.tokens} of a run"
            hint = "trials are shorter than runs"
            arms.faults.add(("tune", "tokens"), message, hint, arm=arm.name)
            return
    for end in (min, max):
        trial = [Part(("tune", "tokens"), ("training", "tokens"))]
        for name in section.fields:
            values = arms.faults.source.entries("tune", "fields", name)
            key = end(values.keys() - {"log"}, key=lambda key: _sortable(values[key]))
            trial.append(Part(("tune", "fields", name, key), ("training", name)))
        for arm in arms.arms.values():
            parts = arm.parts.under(*trial)
            training = arms.sections.build("training", parts).value
            # as in its runs
            every = arm.training.eval_every_tokens
            training = replace(training, eval_every_tokens=every)
            for misfit in checks.budget_misfits(training, arm.recipe):
                arms.add_fault(parts, misfit)


def _sortable(value: float | None) -> float:
    """Return a value that a field may have, such that null is the lowest."""
    return -math.inf if value is None else value


# ---- search -------------------------------------------------------------------------------------------


def check_search(file: StudyFile | None, arms: Arms) -> Search | None:
    """Check and build the study's ``search``; None for an ordinary study, or if the file has a fault."""
    faults = arms.faults
    source = faults.source
    if "search" not in source.data:
        return None
    _check_keys_of_search(faults)
    for name in source.mapping("arms"):
        for section in source.mapping("arms", name):  # resources change no result
            if section in SECTIONS and section not in ("recipe", "resources"):
                message = f"a search compares recipes: '{name}' must not set {section}"
                hint = "set it in base, for all of them"
                faults.add(("arms", name, section, KEY), message, hint)
    for factor in source.mapping("grid", "factors"):
        if factor.split(".")[0] != "recipe":
            message = f"a search compares recipes: '{factor}' is no part of one"
            faults.add(("grid", "factors", factor, KEY), message)
    if file is None or file.search is None:
        return None
    labels: dict[str, dict[str, None]] = {}
    cells = []
    for cell, arm in arms.cells:
        own_labels = {level.factor: level.label for level in cell.levels}
        for factor, label in own_labels.items():
            labels.setdefault(factor, {})[label] = None
        if arm is not None:
            cells.append((own_labels, arm))
    factors = {factor: tuple(seen) for factor, seen in labels.items()}
    return Search(**vars(file.search), factors=factors, cells=tuple(cells))


def _check_keys_of_search(faults: Faults) -> None:
    """Refuse the keys that mean something in a study alone."""
    hints = {
        ("seeds",): "search.seed is the seed of its runs",
        ("base", "training", "tokens"): "search.budgets says it",
        ("base", "fork"): "it belongs to a study",
    }
    for key in children(StudyFile):
        if key not in _KEYS_OF_A_SEARCH:
            hints.setdefault((key,), "it belongs to a study")
    for path, hint in hints.items():
        if faults.source.get(*path) is not None:
            faults.add((*path, KEY), f"a search has no '{path[-1]}'", hint)
