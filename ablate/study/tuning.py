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
from ablate.study.checks import ArmChecks
from ablate.study.faults import did_you_mean, got_text
from ablate.study.grid import check_value
from ablate.study.sections import TUNABLE, RangeSection, TuneSection
from ablate.study.shapes import Shapes
from ablate.study.space import Choices, Range, Tune, TuneGroup, combinations, tuned_name
from ablate.study.tree import Mapping, Node, Scalar, Sequence, entries, get, merge, plain

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from ablate.study.faults import Faults
    from ablate.study.fold import ArmCollector
    from ablate.study.merge import Draft
    from ablate.study.space import Space
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
    fields = _fields(node.entries["fields"], faults)
    trials = _trials(node, section, fields, faults)
    groups = _groups(node, collector, faults)
    if faults.any_within("tune") or not fields:
        return None
    _check_names(node, collector, faults)
    _check_values(node, fields, groups, collector, faults)
    _check_budget(node, section, fields, collector, list(drafts), faults)
    free = (seed for seed in itertools.count(FIRST_TRIAL_SEED) if seed not in used_seeds)
    return Tune(
        fields=fields,
        tokens=section.tokens,
        sampler=section.sampler,
        trials=trials,
        at_once=section.at_once,
        prune=section.prune,
        seeds=tuple(itertools.islice(free, section.seeds)),
        groups=tuple(
            TuneGroup(name=name, arms=arms, shared=_own_values(fields, collector.arms[arms[0]]))
            for name, arms in groups.items()
        ),
    )


def _fields(node: Node, faults: Faults) -> Space:
    found: Space = {}
    for name, values in entries(node).items():
        if name not in TUNABLE:
            key = node.keys[name] if isinstance(node, Mapping) else node
            if name in TrainingConfig.__dataclass_fields__:
                hint = f"what the optimizer and its schedule use: {', '.join(TUNABLE)}"
                faults.add(key, "cannot be tuned", hint)
            else:
                close = did_you_mean(name.removeprefix("training."), TUNABLE)
                faults.add(key, "no field of training", close or f"one of {', '.join(TUNABLE)}")
        elif isinstance(values, Sequence):
            _list(name, values, found, faults)
        elif isinstance(values, Mapping):
            _range(name, values, found, faults)
        else:
            faults.add(values, f"expected a list of values, or {{low: …, high: …}}, got {got_text(values)}")
    return found


def _list(name: str, node: Sequence, found: Space, faults: Faults) -> None:
    seen: list[Any] = []
    for item in node.items:
        check_value(("training", name), item, faults)
        value = plain(item)
        if value in seen:
            faults.add(item, f"value {got_text(item)} given twice")
        seen.append(value)
    if len(seen) < 2:
        faults.add(node, "expected at least two values", "one value belongs in base.training")
    elif not faults.any_within("tune"):
        found[name] = Choices(values=tuple(seen))


def _range(name: str, node: Mapping, found: Space, faults: Faults) -> None:
    try:
        section: RangeSection = TypeAdapter(RangeSection).validate_python(plain(node))
    except ValidationError as error:
        faults.add_validation(error, node, section=RangeSection)
        return
    for end in ("low", "high"):
        check_value(("training", name), node.entries[end], faults)
    if section.low >= section.high:
        faults.add(node.entries["low"], f"low {section.low:g} is not below high {section.high:g}")
    if section.log and section.low <= 0:
        faults.add(node.entries["low"], f"a logarithmic range begins above 0, got {section.low:g}")
    if not faults.any_within("tune"):
        whole = name in ("warmup_tokens", "decay_tokens")
        found[name] = Range(low=section.low, high=section.high, log=section.log, whole=whole)


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
    for name in entries(written):
        if name in collector.arms and group_of.get(name) != name:
            assert isinstance(written, Mapping)
            faults.add(written.keys[name], f"an arm that is not in it is called '{name}', too")
    groups: dict[str, tuple[str, ...]] = {}
    for arm in collector.arms:
        name = group_of.get(arm, arm)
        groups[name] = (*groups.get(name, ()), arm)
    return groups


def _check_names(node: Mapping, collector: ArmCollector, faults: Faults) -> None:
    for arm in collector.arms:
        if tuned_name(arm) in collector.arms:
            what = f"an arm of the name '{tuned_name(arm)}' is there already"
            faults.add(node, what, f"'{arm}' at the values found for it takes that name")


def _own_values(fields: Space, arm: ResolvedArm) -> dict[str, Any]:
    return {name: getattr(arm.training, name) for name in fields}


def _check_values(
    node: Mapping,
    fields: Space,
    groups: dict[str, tuple[str, ...]],
    collector: ArmCollector,
    faults: Faults,
) -> None:
    """Check that the search may try the study's own values, and that arms differ in more than those."""
    for name, field in fields.items():
        for arm in collector.arms.values():
            own = getattr(arm.training, name)
            if isinstance(field, Choices):
                inside = own in field.values
            else:
                inside = own is not None and field.low <= own <= field.high
            if not inside:
                what = f"the study's own {name}, {_text(own)}, is not among the values"
                faults.add(node_of(node, name), what, "it is always tried, so that tuning can only gain",
                           arm=arm.name)  # fmt: skip
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


def node_of(node: Mapping, field: str) -> Node:
    """Return the place of a field's values in the tune section."""
    found = get(node, "fields", field)
    assert found is not None
    return found


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
    shapes = Shapes()
    for draft in drafts:
        if draft.name not in collector.arms:
            continue
        for pick in (min, max):
            ends = {name: pick(_ends(node_of(node, name)), key=_size) for name in fields}
            override = Mapping(
                path=node.path, line=node.line, column=node.column, entries={"tokens": tokens, **ends},
                keys=dict.fromkeys(["tokens", *ends], node),
            )  # fmt: skip
            inherited = draft.sections.get("training")
            trial = replace(
                draft,
                lineage=(("tune",), *draft.lineage),
                sections={**draft.sections, "training": merge(inherited, override)},
            )
            training = collector.builder.build("training", trial.sections["training"])
            assert training is not None  # each value was checked at its own place
            checks = ArmChecks(trial, faults, shapes)
            checks.training(training)
            checks.phases(training, collector.arms[draft.name].recipe)


def _ends(node: Node) -> list[Node]:
    """Return the values of a list, or both ends of a range."""
    if isinstance(node, Sequence):
        return list(node.items)
    return [node.entries["low"], node.entries["high"]] if isinstance(node, Mapping) else []


def _size(node: Node) -> float:
    value = node.value if isinstance(node, Scalar) else None
    return float(value) if isinstance(value, int | float) else -math.inf
