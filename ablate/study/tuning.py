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

from pydantic import TypeAdapter, ValidationError

from ablate.run.config import TrainingConfig
from ablate.store.plan_file import GroupTuning
from ablate.study.checks import ArmChecks
from ablate.study.grid import check_value
from ablate.study.messages import did_you_mean, got_text
from ablate.study.search_space import Choices, Range, Tune, combinations, tuned_name
from ablate.study.sections import TUNABLE, RangeSection, TuneSection
from ablate.study.shape_checks import Fit
from ablate.study.tree import Mapping, Node, Scalar, Sequence, entries, get, merge, plain, plain_at

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from ablate.study.build_arms import ArmCollector
    from ablate.study.merge import Draft
    from ablate.study.messages import Faults
    from ablate.study.search_space import Space
    from ablate.study.study import ResolvedArm

MAX_TRIALS = 1000
FIRST_TRIAL_SEED = 1_000_000
"""Far from the seeds that people choose: a study that gets more seeds keeps its tuned values."""


def check_tune(
    root: Mapping,
    collector: ArmCollector,
    drafts: Iterable[Draft],
    used_seeds: Collection[int],
    faults: Faults,
) -> Tune | None:
    """Return the study's search for values; None if it has none or the section has a fault.

    ``used_seeds``: the seeds of the study's runs, which trials must not use.
    """
    node = get(root, "tune")
    if not isinstance(node, Mapping):
        return None
    try:
        section: TuneSection = TypeAdapter(TuneSection).validate_python(plain(node))
    except ValidationError:
        return None  # reported when the file's shape was checked
    written = node.entries["fields"]
    assert isinstance(written, Mapping)
    fields = _fields(written, faults)
    trials = _trials(node, section, fields, faults)
    groups = _groups(node, collector, faults)
    if faults.any_within("tune") or not fields:
        return None
    _check_values(node, fields, groups, collector, faults)
    _check_budget(node, section, fields, collector, list(drafts), faults)
    free = (seed for seed in itertools.count(FIRST_TRIAL_SEED) if seed not in used_seeds)
    return Tune(
        study=f"{plain_at(root, 'name')} tune",
        fields=fields,
        tokens=section.tokens,
        sampler=section.sampler,
        trials=trials,
        at_once=section.at_once,
        prune=section.prune,
        seeds=tuple(itertools.islice(free, section.seeds)),
        groups=tuple(
            GroupTuning(
                name=name,
                arms=arms,
                shared=_own_values(fields, collector.arms[arms[0]]),
                trials=(),
                chosen=None,
            )
            for name, arms in groups.items()
        ),
    )


def _fields(node: Mapping, faults: Faults) -> Space:
    found: Space = {}
    for name, values in node.entries.items():
        if name in TUNABLE:
            if (field := _values(name, values, faults)) is not None and not faults.any_within("tune"):
                found[name] = field
        elif name in TrainingConfig.__dataclass_fields__:
            hint = f"what the optimizer and its schedule use: {', '.join(TUNABLE)}"
            faults.add(node.keys[name], "cannot be tuned", hint)
        else:
            close = did_you_mean(name.removeprefix("training."), TUNABLE)
            faults.add(node.keys[name], "no field of training", close or f"one of {', '.join(TUNABLE)}")
    return found


def _values(name: str, node: Node, faults: Faults) -> Range | Choices | None:
    if isinstance(node, Mapping):
        return _range(name, node, faults)
    if not isinstance(node, Sequence):
        faults.add(node, f"expected a list of values, or {{low: …, high: …}}, got {got_text(node)}")
        return None
    seen: list[Any] = []
    for item in node.items:
        check_value(("training", name), item, faults)
        value = plain(item)
        if value in seen:
            faults.add(item, f"value {got_text(item)} given twice")
        seen.append(value)
    if len(seen) < 2:
        faults.add(node, "expected at least two values", "one value belongs in base.training")
    return Choices(values=tuple(seen))


def _range(name: str, node: Mapping, faults: Faults) -> Range | None:
    try:
        section: RangeSection = TypeAdapter(RangeSection).validate_python(plain(node))
    except ValidationError as error:
        faults.add_validation(error, node, section=RangeSection)
        return None
    for end in ("low", "high"):
        check_value(("training", name), node.entries[end], faults)
    if section.low >= section.high:
        faults.add(node.entries["low"], f"low {section.low:g} is not below high {section.high:g}")
    if section.log and section.low <= 0:
        faults.add(node.entries["low"], f"a logarithmic range begins above 0, got {section.low:g}")
    whole = name in ("warmup_tokens", "decay_tokens")
    return Range(low=section.low, high=section.high, log=section.log, whole=whole)


def _trials(node: Mapping, section: TuneSection, fields: Space, faults: Faults) -> int:
    """Return the number of trials of a group."""
    if section.sampler == "grid":
        if section.trials is not None:
            hint = "leave it out: it is every combination of the lists"
            faults.add(node.entries["trials"], "a grid has as many trials as it has combinations", hint)
        for name, field in fields.items():
            if isinstance(field, Range):
                at = get(node, "fields", name) or node
                faults.add(at, "a grid needs a list of values", "or sampler: tpe, which takes ranges")
                return 0
        count = len(combinations(fields))
        if count > MAX_TRIALS:
            faults.add(node.keys["fields"], f"the grid has {count} combinations", f"at most {MAX_TRIALS}")
        return count
    if section.trials is None:
        faults.add(node, "missing key 'trials'", "how many of each group; a grid may leave it out")
        return 0
    there = math.prod(field.count for field in fields.values()) if fields else math.inf
    if section.trials > there:
        what = f"{section.trials} trials, but only {there:.0f} combinations"
        faults.add(node.entries["trials"], what, "or sampler: grid, which takes every one once")
    if section.trials > MAX_TRIALS:
        faults.add(node.entries["trials"], f"{section.trials} trials are too many", f"at most {MAX_TRIALS}")
    return section.trials


def _groups(node: Mapping, collector: ArmCollector, faults: Faults) -> dict[str, tuple[str, ...]]:
    """Return the arms of each group in the order of the study; any other arm has a group of its own."""
    folded = {cell.name: cell.into for cell in collector.folded}
    group_of: dict[str, str] = {}
    written = get(node, "groups")
    for name, members in entries(written).items():
        for item in members.items if isinstance(members, Sequence) else ():
            arm = str(plain(item))
            arm = folded.get(arm, arm)
            if arm not in collector.arms:
                hint = did_you_mean(arm, collector.arms) or f"arms: {', '.join(list(collector.arms)[:8])}"
                faults.add(item, f"no arm {got_text(item)}", hint)
            elif arm in group_of:
                faults.add(item, f"arm '{arm}' is in a group already", f"'{group_of[arm]}'")
            else:
                group_of[arm] = name
    for name, key in (written.keys if isinstance(written, Mapping) else {}).items():
        if name in collector.arms and group_of.get(name) != name:
            faults.add(key, f"an arm that is not in it is called '{name}', too")
    groups: dict[str, tuple[str, ...]] = {}
    for arm in collector.arms:
        name = group_of.get(arm, arm)
        groups[name] = (*groups.get(name, ()), arm)
    return groups


def _own_values(fields: Space, arm: ResolvedArm) -> dict[str, Any]:
    return {name: getattr(arm.training, name) for name in fields}


def _check_values(
    node: Mapping,
    fields: Space,
    groups: dict[str, tuple[str, ...]],
    collector: ArmCollector,
    faults: Faults,
) -> None:
    """Check the tuned arms' names, that their own values may be tried, and that they differ in more."""
    for name in collector.arms:
        if tuned_name(name) in collector.arms:
            what = f"an arm of the name '{tuned_name(name)}' is there already"
            faults.add(node, what, f"'{name}' at the values found for it takes that name")
    values = entries(get(node, "fields"))
    for name, field in fields.items():
        for arm in collector.arms.values():
            own = getattr(arm.training, name)
            if isinstance(field, Choices):
                inside = own in field.values
            else:
                inside = own is not None and field.low <= own <= field.high
            if not inside:
                what = f"the study's own {name}, {_text(own)}, is not among the values"
                hint = "it is always tried, so that tuning can only gain"
                faults.add(values[name], what, hint, arm=arm.name)
    for group, arms in groups.items():
        shared = _own_values(fields, collector.arms[arms[0]])
        for other in arms[1:]:
            if _own_values(fields, collector.arms[other]) != shared:
                what = f"arms '{arms[0]}' and '{other}' of one group start from other values"
                faults.add(get(node, "groups", group) or node, what, "give each a group of its own")
    first: dict[tuple[str, ...], str] = {}
    blank = {name: getattr(TrainingConfig(), name) for name in fields}
    for arm in collector.arms.values():
        parts = (arm.model, arm.data, replace(arm.training, **blank), arm.recipe)
        content = (arm.backend, arm.trainer or "", *(part.text for part in parts))
        same = first.setdefault(content, arm.name)
        if same != arm.name:
            what = f"arms '{same}' and '{arm.name}' differ in nothing but what is tuned"
            faults.add(node.keys["fields"], what, "tuned, they would be one arm")


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _check_budget(
    node: Mapping,
    section: TuneSection,
    fields: Space,
    collector: ArmCollector,
    drafts: list[Draft],
    faults: Faults,
) -> None:
    """Check every arm at the trials' budget with the lowest and with the highest values."""
    tokens = node.entries["tokens"]
    for arm in collector.arms.values():
        if section.tokens > arm.training.tokens:
            what = f"{section.tokens} tokens a trial exceed the {arm.training.tokens} of a run"
            faults.add(tokens, what, "trials are shorter than runs", arm=arm.name)
            return
    fit = Fit()
    values = entries(get(node, "fields"))
    for draft in drafts:
        if draft.name not in collector.arms:
            continue
        for pick in (min, max):
            ends = {name: pick(_ends(values[name]), key=_size) for name in fields}
            override = replace(node, entries={"tokens": tokens, **ends})
            training_node = merge(draft.sections.get("training"), override)
            trial = replace(
                draft,
                lineage=(("tune",), *draft.lineage),
                sections={**draft.sections, "training": training_node},
            )
            training = collector.builder.build("training", training_node)
            assert training is not None  # each value was checked at its own place
            checks = ArmChecks(trial, faults, fit)
            checks.training(training)
            checks.phases(training, collector.arms[draft.name].recipe)


def _ends(node: Node) -> list[Node]:
    """Return the values of a list, or both ends of a range."""
    return list(node.items) if isinstance(node, Sequence) else [entries(node)[end] for end in ("low", "high")]


def _size(node: Node) -> float:
    value = node.value if isinstance(node, Scalar) else None
    return float(value) if isinstance(value, int | float) else -math.inf
