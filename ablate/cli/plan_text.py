"""What ``ablate plan`` prints: the runs of a study, with nothing started."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ablate.base.errors import UserError
from ablate.cli.common import deliver, format_table, names_text
from ablate.cli.plan_hardware import chosen_hardware, hardware_content, hardware_lines
from ablate.execute.pending_runs import find_elsewhere, taken_text
from ablate.models.arithmetic import parameters_text, schedule_text
from ablate.plan import build_plan, code_warning, estimate, known_plan, read_progress
from ablate.plan.estimate import SPREAD, cost_found, duration_text
from ablate.plan.layers import LayerGroup, layer_groups
from ablate.plan.tuning import range_text, values_text
from ablate.store import StudyStore
from ablate.store.plan_file import plan_to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from ablate.plan import Plan, PlanCosts, PlannedArm, StudyProgress
    from ablate.study import Study

_MAX_GROUPS = 4
_HIGH_PRECISION = "bf16"
"""Description of a layer that no recipe applies to."""
_GROUND = "measured where runs are finished, else modelled: an order of magnitude, emulation takes longer"
_CROSSINGS = {"confirmed": "confirmed crossing", "first_eval": "first evaluation"}
_TARGETS = {"val_loss": "validation loss {:g} nats per token", "perplexity": "perplexity {:g}"}


def show_plan(
    study: Study,
    as_json: bool,
    dry_run: bool,
    layers: bool,
    all_runs: bool,
    hardware: tuple[str, ...],
    prices: dict[str, float],
    storage: Path,
) -> None:
    """Print the plan of a study; the other parameters are the options of the verb.

    Raises:
        UserError: data are missing; all that does not depend on them is printed before.
    """
    plan = build_plan(study, without_data=True)
    store = StudyStore(storage / plan.study)
    if not store.path.exists() and (warning := code_warning(study)):
        click.echo(warning, err=True)
    plan = known_plan(plan, store)
    named = chosen_hardware(plan, hardware, prices)
    progress = read_progress(plan, store)
    # A run would take results of other studies in the storage, which have no weights.
    runs = () if plan.keep_weights else plan.runs()
    to_do = {run.id: arm.resources for arm, run in runs if run.id and run.id not in progress.states}
    there = find_elsewhere(store, to_do)
    states = {run_id: other.run(run_id).status().state for run_id, other in there.items()}
    progress = replace(progress, states=progress.states | states)
    elsewhere = {run_id: other.path.name for run_id, other in there.items()}
    costs = estimate(plan, progress, cores=os.cpu_count() or 1)
    tried = _dry_runs(plan) if dry_run else []
    on_hardware, of_all = hardware_content(plan, named, prices) if named or as_json else ([], {})

    def content() -> dict[str, Any]:
        whole = _content(plan, progress, costs)
        for entry, found in zip(whole["arms"], tried, strict=False):
            entry["dry_run"] = found
        for entry, where in zip(whole["arms"], on_hardware, strict=True):
            entry["on_hardware"] = where
        return whole | {"taken_from": elsewhere, "on_hardware": of_all}

    def lines() -> Iterator[str]:
        yield from _head(plan, progress)
        yield from _figures(plan, progress, costs, elsewhere)
        if named:
            yield from hardware_lines([arm.name for arm in plan.arms], on_hardware, of_all)
        for title, cells in (("folded", plan.folded), ("dropped", plan.dropped)):
            if cells:
                yield f"\n{title} cells of the grid: {len(cells):,}"
            yield from (f"  {cell.name}: {cell.reason}" for cell in cells)
        if all_runs:
            listed = [(run.id, arm.name, str(run.seed), progress.state(run.id)) for arm, run in plan.runs()]
            yield "\n" + format_table(("id", "arm", "seed", "state"), listed)
        if layers:
            rows = [
                ("" if place else arm.name, " ".join(group.names), str(group.count), group.recipe)
                for arm in plan.arms
                for place, group in enumerate(_layer_groups(arm))
            ]
            yield "\n" + format_table(("arm", "linear layers", "n", "carry"), rows)
            yield from (f"\n{arm.name}: {arm.coverage}" for arm in plan.arms if arm.coverage is not None)
        for arm, found in zip(plan.arms, tried, strict=False):
            yield (
                f"dry run  {arm.name}: {found['parameters']:,} parameters, {found['linear_layers']} linear "
                f"layers, forward and backward of {found['tokens']:,} tokens fit"
            )
        if plan.missing:
            yield "\nno ids: a run's id is a hash of its data, too, and they cannot be used as they are:"

    deliver(content() if as_json else None, lines, as_json=as_json)
    if plan.missing:
        raise UserError(*plan.missing)


def _content(plan: Plan, progress: StudyProgress, costs: PlanCosts) -> dict[str, Any]:
    """Return the lock file's content, with present progress and with costs on this machine."""
    content = plan_to_json(plan)
    for arm, entry in zip(plan.arms, content["arms"], strict=True):
        for run in entry["runs"]:
            run["state"] = progress.state(run["id"])
            run["id"] = run["id"] or None
        config = asdict(arm.config.with_seed(arm.runs[0].seed))
        del config["seed"]
        flops = None if arm.size is None else arm.size.flops_per_token
        entry |= {
            "config": config,
            "resources": asdict(arm.resources),
            "batches": {k: v for k, v in asdict(arm.batches).items() if not k.endswith("_every_steps")},
            "schedule": schedule_text(arm.config.training),
            "parameters": None if arm.size is None else arm.size.parameters,
            "layers": [asdict(group) for group in _layer_groups(arm)],
            "coverage": None if arm.coverage is None else arm.coverage.as_json(),
            "flops_per_token": flops,
            "flops_per_run": flops and flops * arm.batches.tokens,
            "seconds_per_run": costs.run_seconds.get(arm.name),
            "seconds_are": costs.ground.get(arm.name),
        }
    return content | {
        "missing": [str(problem) for problem in plan.missing],
        "folded": [{"name": c.name, "into": c.into, "reason": c.reason} for c in plan.folded],
        "estimate": {
            "wall_seconds": costs.wall_seconds,
            "cores": costs.cores,
            "storage_bytes": costs.storage_bytes,
            "shared_tokens": sum(costs.shared_tokens.values()),
        },
    }


def _dry_runs(plan: Plan) -> list[dict[str, int]]:
    from ablate.train.probe import dry_run

    found = []
    for arm in plan.arms:
        config = arm.config.with_seed(arm.runs[0].seed)
        try:
            found.append(asdict(dry_run(config, arm.resources.devices_per_run)))
        except (ValueError, UserError) as error:
            raise UserError(f"arm '{arm.name}': {error}") from None
    return found


def _layer_groups(arm: PlannedArm) -> list[LayerGroup]:
    return layer_groups(arm.config.recipe, arm.layers, arm.batches.tokens)


def _head(plan: Plan, progress: StudyProgress) -> Iterator[str]:
    description = f": {' '.join(plan.description.split())}" if plan.description else ""
    yield plan.study + description
    target = "no target: final losses are compared (`ablate pilot` says which target to take)"
    if plan.target is not None:
        value = _TARGETS[plan.target.kind].format(plan.target.value)
        target = f"target {value} ({_CROSSINGS[plan.target.crossing]})"
    yield f"baseline {plan.baseline}; {target}"
    seeds = [run.seed for run in plan.arms[0].runs]
    shown = ", ".join(map(str, seeds[:8])) + (f", … ({len(seeds)} in all)" if len(seeds) > 8 else "")
    yield f"seeds {shown}{', paired' if plan.paired_seeds else ''}\n"
    rows = []
    for arm in plan.arms:
        own = (f"{field.rpartition('.')[2]} {_value(pair[1])}" for field, pair in arm.differs.items())
        differs = "(baseline)" if arm.name == plan.baseline else "; ".join(own)
        rows.append((arm.name, arm.recipe, differs, _states(progress, (run.id for run in arm.runs))))
    yield format_table(("arm", "recipe", "differs from the baseline in", "runs"), rows) + "\n"


def _figures(
    plan: Plan, progress: StudyProgress, costs: PlanCosts, elsewhere: dict[str, str]
) -> Iterator[str]:
    tokens = sum(arm.batches.tokens * len(arm.runs) for arm in plan.arms)
    ids = [run.id for _, run in plan.runs()]
    runs = [f"{len(ids):,} ({_states(progress, ids)}), {tokens:,} tokens in all"]
    if elsewhere:
        runs.append(f"of the results {taken_text(elsewhere)}: same configuration, same code")
    if shared := costs.shared_tokens:
        runs.append(
            f"{len(shared):,} begin with steps that another trains, to the same bits: "
            f"{sum(shared.values()):,} tokens less"
        )
    time = f"about {duration_text(costs.wall_seconds or 0)} on {costs.cores} CPU cores ({_GROUND})"
    if costs.wall_seconds is None:
        time = "not known before a run is finished: the study does not describe the model"
    elif not costs.wall_seconds:
        time = "nothing left to run"
    elif costs.uses_gpu:
        time = f"about {duration_text(costs.wall_seconds)}, one GPU job at a time ({_GROUND})"
    figures = {
        "tuning": _tuning_texts(plan),
        "batch": _each(plan, _batch_text),
        "budget": _each(
            plan,
            lambda arm: (
                f"{arm.batches.tokens:,} tokens a run in {arm.batches.steps:,} steps, "
                f"{arm.batches.evals:,} evaluations"
            ),
        ),
        "work": _each(
            plan,
            lambda arm: (
                "not known"
                if arm.size is None
                else f"{arm.size.flops_per_token * arm.batches.tokens:.3g} FLOPs a run"
            ),
        ),
        "schedule": _each(plan, lambda arm: schedule_text(arm.config.training)),
        "model": _each(plan, _model_text),
        "layers": _each(plan, _carried_text),
        "seeds": _seeds_texts(plan),
        "fork": [
            f"{arm.name} from {arm.fork.arm} after {arm.fork.tokens:,} tokens; token costs count from there"
            for arm in plan.arms
            if arm.fork is not None
        ],
        "runs": runs,
        "time": [time],
        "storage": [f"about {costs.storage_bytes / 1e6:,.1f} MB, without the token cache"],
    }
    for name, texts in figures.items():
        yield from (f"{'' if place else name:<9} {text}" for place, text in enumerate(texts))


def _tuning_texts(plan: Plan) -> list[str]:
    tuning, lock = plan.tune, plan.tuning
    if tuning is None or lock is None:
        return []
    runs = tuning.trials * len(tuning.seeds) * sum(len(group.arms) for group in tuning.groups)
    texts = [f"{name} {range_text(field)}" for name, field in tuning.fields.items()]
    texts.append(
        f"{tuning.trials} trials of {lock.tokens:,} tokens for each of {len(tuning.groups)} groups, by "
        f"{tuning.sampler}: {runs:,} runs, at most {runs * lock.tokens:,} tokens, before the runs of the arms"
    )
    if tuning.is_done:
        return [*texts, *(f"{group.name}: {values_text(group.chosen or {})}" for group in tuning.groups)]
    return [*texts, "not done yet; arms at the values found come on top of those above"]


def _seeds_texts(plan: Plan) -> list[str]:
    """Say which costs the seeds, and more seeds, would find, and when an arm stops early."""
    texts, rule, others = [], plan.stop, max(1, len(plan.arms) - 1)
    spread = f"where pairs of runs spread by {SPREAD:.1%}"
    if rule is not None and rule.diverged is not None:
        texts.append(f"an arm stops after diverged runs: {rule.diverged}")
    if rule is not None and rule.settled is not None:
        from ablate.reports.words import format as words
        from ablate.results.stop_rule import expected_seeds, levels_of

        first, last = rule.settled.looks[0], rule.settled.looks[-1]
        levels = words.levels(levels_of(rule.settled))
        texts.append(f"an arm stops where it is settled: looks after each of {first} to {last}, at {levels}")
        margin = None if plan.target is None else plan.target.within
        expected = partial(expected_seeds, rule.settled, spread=SPREAD, arms=others, margin=margin)
        needed = (f"{expected(cost):.1f} at a cost of {cost:.0%}" for cost in (0.05, 0.1, 0.2))
        texts.append(f"expected for an arm: {', '.join(needed)} (simulated, {spread})")
    elif plan.paired_seeds:
        own = len(plan.arms[0].runs)
        wanted = [own, *[n for n in (2, 3, 5, 8) if n > own][:2]]
        found = ((n, cost_found(n, others, moderated=plan.is_moderated)) for n in wanted)
        each = (f"{n} find a cost of {cost:.0%}" for n, cost in found if cost is not None)
        texts.append(f"{', '.join(each)} in 4 of 5 comparisons ({spread})")
    return texts


def _batch_text(arm: PlannedArm) -> str:
    training, batches = arm.config.training, arm.batches
    text = f"{training.batch_size} sequences × {training.seq_len} tokens = {batches.tokens_per_step:,} a step"
    if batches.micro_batches > 1:
        of = training.batch_size // batches.micro_batches
        text += f", in {batches.micro_batches} micro-batches of {of}"
    if arm.resources.devices_per_run > 1:
        text += f", on {arm.resources.devices_per_run} devices"
    return text


def _model_text(arm: PlannedArm) -> str:
    model = arm.config.model
    if arm.size is None:
        return f"not known: {arm.config.trainer} builds it, and the study has no model"
    text = model.function or f"{model.hf}, {'pretrained' if model.pretrained else 'random'} weights"
    if model.is_built_in:
        text = f"{model.architecture}, width {model.width}, layers {model.layers}, heads {model.heads}"
        text += f", ffn {model.ffn}" + f" of {model.experts} experts" * (model.experts is not None)
    return f"{text}: {parameters_text(arm.size.parameters)} parameters"


def _carried_text(arm: PlannedArm) -> str:
    if arm.size is None:
        return "not known"
    carrying = sum(group.count for group in _layer_groups(arm) if group.recipe != _HIGH_PRECISION)
    text = f"{carrying} of {len(arm.layers)} linear layers in low precision"
    if arm.coverage is not None and (hidden := arm.coverage.out_of_reach):
        text += f"; matrices out of reach: {len(hidden)}"
    return text


def _each(plan: Plan, text_of: Callable[[PlannedArm], Any]) -> list[str]:
    """Write one line if the texts of all arms agree, else one line for each group of arms."""
    groups: dict[str, list[str]] = {}
    for arm in plan.arms:
        groups.setdefault(text_of(arm), []).append(arm.name)
    if len(groups) == 1:
        return list(groups)
    lines = [f"{text} ({names_text(names)})" for text, names in list(groups.items())[:_MAX_GROUPS]]
    if len(groups) > _MAX_GROUPS:
        lines.append(f"and {len(groups) - _MAX_GROUPS} others (--json lists all)")
    return lines


def _states(progress: StudyProgress, ids: Iterable[str]) -> str:
    counts = Counter(progress.state(run_id) for run_id in ids)
    return ", ".join(f"{count:,} {state}" for state, count in counts.items())


def _value(value: Any) -> str:
    if isinstance(value, list):
        return "+".join(map(_value, value)) or "none"
    if isinstance(value, dict):
        return " ".join(f"{key} {_value(item)}" for key, item in value.items()) or "default"
    if value is None or isinstance(value, bool):
        return {None: "default", True: "true", False: "false"}[value]
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)
