"""``tune:`` of a study: the fields that each arm may set for itself before the seeds run, and the budget.

Every value that the search may try must hold for every arm, at the trials' budget and at the arm's own. The
arms' checks therefore run at the lowest and the highest values.

How it fails: each fault is added at its place. A field that would change what is compared (the batch, the
evaluation, the budget) is refused.
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
from ablate.study.grid import check_value, items
from ablate.study.search_space import Choices, Range, Tune, combinations, tuned_name
from ablate.study.sections import MAX_TRIALS, RangeSection, StudyFile, TuneSection
from ablate.study.source import KEY, get

if TYPE_CHECKING:
    from ablate.study.arms import Arms
    from ablate.study.faults import Faults
    from ablate.study.layers import Layer
    from ablate.study.search_space import Space
    from ablate.study.source import Path
    from ablate.study.study import ResolvedArm

FIRST_TRIAL_SEED = 1_000_000
"""Far from the seeds that people choose: a study that gets more seeds keeps its tuned values."""


def check_tune(file: StudyFile, found: Arms, faults: Faults) -> Tune | None:
    """Return the study's search for values; None if it has none or the section has a fault."""
    section = file.tune
    if section is None:
        return None
    fields = {name: _values(name, values, faults) for name, values in section.fields.items()}
    trials = 0 if faults.any_within("tune") else _trials(section, fields, faults)
    groups = _groups(found, section, faults)
    if faults.any_within("tune"):
        return None
    _check_arms(fields, groups, found, faults)
    _check_budget(section, found, faults)
    first = max(file.every_seed) + 1
    used = {*file.every_seed, *(range(first, first + len(file.every_seed)) if file.baseline_again else ())}
    free = (seed for seed in itertools.count(FIRST_TRIAL_SEED) if seed not in used)
    return Tune(
        study=f"{file.name} tune",
        fields=fields,
        tokens=section.tokens,
        sampler=section.sampler,
        trials=trials,
        at_once=section.at_once,
        prune=section.prune,
        seeds=tuple(itertools.islice(free, section.seeds)),
        groups=tuple(
            GroupTuning(
                name=name, arms=arms, shared=_own(fields, found.arms[arms[0]]), trials=(), chosen=None
            )
            for name, arms in groups.items()
        ),
    )


def _values(name: str, values: RangeSection | list[Any], faults: Faults) -> Range | Choices:
    at: Path = ("tune", "fields", name)
    if isinstance(values, RangeSection):
        for end in ("low", "high"):
            check_value(("training", name), (*at, end), faults)
        whole = name in ("warmup_tokens", "decay_tokens")
        return Range(low=values.low, high=values.high, log=values.log, whole=whole)
    for index, value in enumerate(values):
        check_value(("training", name), (*at, index), faults)
        if value in values[:index]:
            faults.add((*at, index), f"value {faults.source.got((*at, index))} given twice")
    if len(values) < 2:
        faults.add(at, "expected at least two values", "one value belongs in base.training")
    return Choices(values=tuple(values))


def _trials(section: TuneSection, fields: Space, faults: Faults) -> int:
    """Return the number of trials of a group."""
    if section.sampler == "grid":
        count = len(combinations(fields))
        if count > MAX_TRIALS:
            faults.add(("tune", "fields", KEY), f"the grid has {count} combinations", f"at most {MAX_TRIALS}")
        return count
    there = math.prod(field.count for field in fields.values())
    if section.trials is not None and section.trials > there:
        what = f"{section.trials} trials, but only {there:.0f} combinations"
        faults.add(("tune", "trials"), what, "or sampler: grid, which takes every one once")
    return section.trials or 0


def _groups(found: Arms, section: TuneSection, faults: Faults) -> dict[str, tuple[str, ...]]:
    """Return the arms of each group in the order of the study; any other arm has a group of its own."""
    folded = {cell.name: cell.into for cell in found.folded}
    group_of: dict[str, str] = {}
    for name, members in section.groups.items():
        for index, member in enumerate(members):
            at, arm = ("tune", "groups", name, index), folded.get(member, member)
            if arm not in found.arms:
                hint = likely(arm, found.arms, f"arms: {', '.join(list(found.arms)[:8])}")
                faults.add(at, f"no arm '{member}'", hint)
            elif group_of.setdefault(arm, name) != name:
                faults.add(at, f"arm '{arm}' is in a group already", f"'{group_of[arm]}'")
    for name in section.groups:
        if name in found.arms and group_of.get(name) != name:
            faults.add(("tune", "groups", name, KEY), f"an arm that is not in it is called '{name}', too")
    groups: dict[str, tuple[str, ...]] = {}
    for arm in found.arms:
        name = group_of.get(arm, arm)
        groups[name] = (*groups.get(name, ()), arm)
    return groups


def _own(fields: Space, arm: ResolvedArm) -> dict[str, Any]:
    return {name: getattr(arm.training, name) for name in fields}


def _check_arms(fields: Space, groups: dict[str, tuple[str, ...]], found: Arms, faults: Faults) -> None:
    """Check the tuned arms' names, that their own values may be tried, and that they differ in more."""
    blank = {name: getattr(TrainingConfig(), name) for name in fields}
    first: dict[tuple[str, ...], str] = {}
    for arm in found.arms.values():
        if tuned_name(arm.name) in found.arms:
            what = f"an arm of the name '{tuned_name(arm.name)}' is there already"
            faults.add(("tune",), what, f"'{arm.name}' at the values found for it takes that name")
        for name, own in _own(fields, arm).items():
            field = fields[name]
            if isinstance(field, Choices):
                inside = own in field.values
            else:
                inside = own is not None and field.low <= own <= field.high
            if not inside:
                what = f"the study's own {name}, {own}, is not among the values"
                hint = "it is always tried, so that tuning can only gain"
                faults.add(("tune", "fields", name), what, hint, arm=arm.name)
        parts = (arm.model, arm.data, replace(arm.training, **blank), arm.recipe)
        content = (arm.backend, arm.trainer or "", *(part.text for part in parts))
        if (same := first.setdefault(content, arm.name)) != arm.name:
            what = f"arms '{same}' and '{arm.name}' differ in nothing but what is tuned"
            faults.add(("tune", "fields", KEY), what, "tuned, they would be one arm")
    for group, arms in groups.items():
        other = next(
            (arm for arm in arms if _own(fields, found.arms[arm]) != _own(fields, found.arms[arms[0]])), None
        )
        if other is not None:
            what = f"arms '{arms[0]}' and '{other}' of one group start from other values"
            faults.add(("tune", "groups", group), what, "give each a group of its own")


def _check_budget(section: TuneSection, found: Arms, faults: Faults) -> None:
    """Check every arm at the trials' budget with the lowest and with the highest values."""
    for arm in found.arms.values():
        if section.tokens > arm.training.tokens:
            what = f"{section.tokens} tokens a trial exceed the {arm.training.tokens} of a run"
            faults.add(("tune", "tokens"), what, "trials are shorter than runs", arm=arm.name)
            return
    written = get(faults.source.data, "tune", "fields")
    for end in (0, -1):
        tried: list[Layer] = [(("tune", "tokens"), ("training", "tokens"))]
        for name, values in items(written):
            ends: list[tuple[str | int, Any]] = list(enumerate(values))
            if isinstance(values, dict):
                ends = [(key, values[key]) for key in ("low", "high")]
            key, _ = sorted(ends, key=lambda one: -math.inf if one[1] is None else one[1])[end]
            tried.append((("tune", "fields", name, key), ("training", name)))
        for arm in found.arms.values():
            layers = (*arm.layers, tuple(tried))
            training, _ = found.sections.build("training", layers)
            for misfit in checks.budget_misfits(training, arm.recipe):
                found.add_fault(arm.name, layers, misfit)
