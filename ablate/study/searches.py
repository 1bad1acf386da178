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
from ablate.study.grid import check_value
from ablate.study.search_space import Choices, Range, Search, Tune, tuned_name
from ablate.study.sections import MAX_TRIALS, SECTIONS, RangeSection, StudyFile, TuneSection
from ablate.study.source import KEY

if TYPE_CHECKING:
    from ablate.study.arms import Arms
    from ablate.study.faults import Faults
    from ablate.study.search_space import Space
    from ablate.study.source import Path

FIRST_TRIAL_SEED = 1_000_000
"""Far from the seeds that people choose: a study that gets more seeds keeps its tuned values."""
_NOT_OF_A_SEARCH = {
    "seeds": "search.seed is the seed of its runs",
    "base.training.tokens": "search.budgets says it",
} | dict.fromkeys(
    [
        "paired_seeds",
        "intervals",
        "baseline_again",
        "tune",
        "stop",
        "diagnostics",
        "keep_weights",
        "base.fork",
    ],
    "it belongs to a study",
)


# ---- tune ---------------------------------------------------------------------------------------------


def check_tune(file: StudyFile, found: Arms) -> Tune | None:
    """Check and build the study's ``tune``; None if it has none or the section has a fault."""
    section, faults = file.tune, found.faults
    if section is None:
        return None
    fields = {name: _values(name, values, faults) for name, values in section.fields.items()}
    trials = section.trials or 0
    if not faults.any_within("tune"):
        there = math.prod(field.count for field in fields.values())
        if section.sampler == "grid":
            trials = int(there)
            if trials > MAX_TRIALS:
                what = f"the grid has {trials} combinations"
                faults.add(("tune", "fields", KEY), what, f"at most {MAX_TRIALS}")
        elif trials > there:
            what = f"{trials} trials, but only {there:.0f} combinations"
            faults.add(("tune", "trials"), what, "or sampler: grid, which takes every one once")
    groups = _groups(found, section)
    if faults.any_within("tune"):
        return None
    own = {
        name: {field: getattr(arm.training, field) for field in fields} for name, arm in found.arms.items()
    }
    _check_arms(fields, groups, own, found)
    _check_budget(section, found)
    first = max(file.every_seed) + 1
    used = {*file.every_seed, *(range(first, first + len(file.every_seed)) if file.baseline_again else ())}
    free = (seed for seed in itertools.count(FIRST_TRIAL_SEED) if seed not in used)
    return Tune(
        study=f"{file.name} tune",
        done=False,
        fields=fields,
        sampler=section.sampler,
        trials=trials,
        at_once=section.at_once,
        prune=section.prune,
        tokens=section.tokens,
        budget=section.tokens,
        seeds=tuple(itertools.islice(free, section.seeds)),
        groups=tuple(
            GroupTuning(name=name, arms=arms, shared=own[arms[0]], trials=(), chosen=None)
            for name, arms in groups.items()
        ),
        tuned={},
    )


def _values(name: str, values: RangeSection | list[Any], faults: Faults) -> Range | Choices:
    at: Path = ("tune", "fields", name)
    for key in ("low", "high") if isinstance(values, RangeSection) else range(len(values)):
        check_value(("training", name), (*at, key), faults)
    if isinstance(values, RangeSection):
        return Range(**vars(values), whole=name in ("warmup_tokens", "decay_tokens"))
    for index, value in enumerate(values):
        if value in values[:index]:
            faults.add((*at, index), f"value {faults.source.got((*at, index))} given twice")
    if len(values) < 2:
        faults.add(at, "expected at least two values", "one value belongs in base.training")
    return Choices(values=tuple(values))


def _groups(found: Arms, section: TuneSection) -> dict[str, tuple[str, ...]]:
    """Return each group's arms in the order of the study; an arm that no group names has its own."""
    faults = found.faults
    group_of: dict[str, str] = {}
    for name, members in section.groups.items():
        for index, member in enumerate(members):
            at, arm = ("tune", "groups", name, index), found.folded.get(member, member)
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


def _check_arms(
    fields: Space, groups: dict[str, tuple[str, ...]], own: dict[str, dict[str, Any]], found: Arms
) -> None:
    """Check that tuned names are free, that arms' own values may be tried, and that arms differ otherwise."""
    faults, blank = found.faults, {name: getattr(TrainingConfig(), name) for name in fields}
    first: dict[tuple[str, ...], str] = {}
    for arm in found.arms.values():
        if tuned_name(arm.name) in found.arms:
            what = f"an arm of the name '{tuned_name(arm.name)}' is there already"
            faults.add(("tune",), what, f"'{arm.name}' at the values found for it takes that name")
        for name, value in own[arm.name].items():
            if value not in fields[name]:
                what = f"the study's own {name}, {value}, is not among the values"
                hint = "it is always tried, so that tuning can only gain"
                faults.add(("tune", "fields", name), what, hint, arm=arm.name)
        content = content_of(replace(arm, training=replace(arm.training, **blank)))
        if (same := first.setdefault(content, arm.name)) != arm.name:
            what = f"arms '{same}' and '{arm.name}' differ in nothing but what is tuned"
            faults.add(("tune", "fields", KEY), what, "tuned, they would be one arm")
    for group, arms in groups.items():
        for other in [arm for arm in arms if own[arm] != own[arms[0]]][:1]:
            what = f"arms '{arms[0]}' and '{other}' of one group start from other values"
            faults.add(("tune", "groups", group), what, "give each a group of its own")


def _check_budget(section: TuneSection, found: Arms) -> None:
    """Check every arm at the trials' budget with the lowest and with the highest values."""
    for arm in found.arms.values():
        if section.tokens > arm.training.tokens:
            what = f"{section.tokens} tokens a trial exceed the {arm.training.tokens} of a run"
            found.faults.add(("tune", "tokens"), what, "trials are shorter than runs", arm=arm.name)
            return
    at: Path = ("tune", "fields")
    for end in (min, max):
        tried: list[tuple[Path, Path]] = [(("tune", "tokens"), ("training", "tokens"))]
        for name in section.fields:
            entries = [one for one in found.faults.source.entries(*at, name) if one[0] != "log"]
            key, _ = end(entries, key=lambda one: -math.inf if one[1] is None else one[1])
            tried.append(((*at, name, key), ("training", name)))
        for arm in found.arms.values():
            layers = (*arm.layers, tuple(tried))
            training, _ = found.sections.build("training", layers)
            training = replace(training, eval_every_tokens=arm.training.eval_every_tokens)  # as in its runs
            for misfit in checks.budget_misfits(training, arm.recipe):
                found.add_fault(arm.name, layers, misfit)


# ---- search -------------------------------------------------------------------------------------------


def check_search(file: StudyFile | None, found: Arms) -> Search | None:
    """Check and build the study's ``search``; None for an ordinary study, or if the file has a fault."""
    faults, source = found.faults, found.faults.source
    if "search" not in source.data:
        return None
    for name, hint in _NOT_OF_A_SEARCH.items():
        path = tuple(name.split("."))
        if source.get(*path) is not None:
            faults.add((*path, KEY), f"a search has no '{path[-1]}'", hint)
    for name, _ in source.items("arms"):
        for section, _ in source.items("arms", name):  # resources change no result
            if section in SECTIONS and section not in ("recipe", "resources"):
                what = f"a search compares recipes: '{name}' must not set {section}"
                faults.add(("arms", name, section, KEY), what, "set it in base, for all of them")
    for factor, _ in source.items("grid", "factors"):
        if factor.split(".")[0] != "recipe":
            what = f"a search compares recipes: '{factor}' is no part of one"
            faults.add(("grid", "factors", factor, KEY), what)
    if file is None or file.search is None:
        return None
    labels: dict[str, dict[str, None]] = {}
    cells = []
    for cell, arm in found.cells:
        levels = {level.factor: level.label for level in cell.levels}
        cells += [(levels, arm)] if arm is not None else []
        for factor, label in levels.items():
            labels.setdefault(factor, {})[label] = None
    factors = {factor: tuple(own) for factor, own in labels.items()}
    return Search(**vars(file.search), factors=factors, cells=tuple(cells))
