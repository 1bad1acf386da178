"""What ``ablate plan`` prints: the runs of a study, with nothing started."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import click

from ablate.base.errors import UserError
from ablate.cli.output import echo_json, format_table, names_text, terminal_width
from ablate.cli.plan_hardware import chosen_hardware, hardware_json, hardware_text
from ablate.execute.pending_runs import find_elsewhere, taken_text
from ablate.models.arithmetic import parameters_text, schedule_text
from ablate.plan import StudyProgress, build_plan, code_warning, estimate, known_plan, read_progress
from ablate.plan.estimate import FLOPS_PER_CPU_CORE, FLOPS_PER_GPU, SPREAD, cost_found, duration_text
from ablate.plan.layers import LayerGroup, layer_groups
from ablate.plan.tuning import range_text, trial_plan, values_text
from ablate.run.architecture import layer_places
from ablate.store import END_STATES, StudyStore
from ablate.store.plan_file import plan_to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from ablate.plan import Plan, PlanCosts, PlannedArm
    from ablate.recipes import Recipe
    from ablate.run.architecture import LinearLayer
    from ablate.store.plan_file import Settled
    from ablate.study import Study

_MAX_GROUPS = 4
_HIGH_PRECISION = "bf16"
"""Description of a layer that no recipe applies to."""


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
    """Print the plan of a study; the other parameters are the options of the verb."""
    plan = build_plan(study, without_data=True)
    store = StudyStore(storage / plan.study)
    if not store.path.exists() and (warning := code_warning(study)):
        click.echo(warning, err=True)
    plan = known_plan(plan, store)
    named = chosen_hardware(plan, hardware, prices)
    progress, elsewhere = _with_neighbours(plan, store, read_progress(plan, store))
    costs = estimate(plan, progress, cores=os.cpu_count() or 1)
    tried = _dry_runs(plan) if dry_run else []
    if as_json:
        content = _to_json(plan, progress, costs) | {"taken_from": elsewhere}
        for entry, found in zip(content["arms"], tried, strict=False):
            entry["dry_run"] = found
        on_hardware, content["on_hardware"] = hardware_json(plan, named, prices)
        for entry, where in zip(content["arms"], on_hardware, strict=True):
            entry["on_hardware"] = where
        echo_json(content, ensure_ascii=False)
    else:
        width = max(80, terminal_width())
        figures = _figures(plan, progress, costs, elsewhere)
        figures += hardware_text(plan, named, prices, width) if named else []
        _show(plan, progress, figures, width, all_runs=all_runs)
        if layers:
            click.echo("\n" + _layers_table(plan, width))
        for arm, found in zip(plan.arms, tried, strict=False):
            click.echo(
                f"dry run  {arm.name}: {found['parameters']:,} parameters, {found['linear_layers']} linear "
                f"layers, forward and backward of {found['tokens']:,} tokens fit"
            )
    if plan.missing:
        raise UserError(*plan.missing)


def _with_neighbours(
    plan: Plan, store: StudyStore, progress: StudyProgress
) -> tuple[StudyProgress, dict[str, str]]:
    """Count results of other studies in the storage, which a run would take; return whose each is, too."""
    runs = () if plan.keep_weights else plan.runs()  # others have results, not weights
    to_do = {run.id: arm.resources for arm, run in runs if run.id and run.id not in progress.states}
    found = find_elsewhere(store, to_do)
    there = {run_id: neighbour.run(run_id).status().state for run_id, neighbour in found.items()}
    studies = {run_id: neighbour.path.name for run_id, neighbour in found.items()}
    return replace(progress, states=progress.states | there), studies


def _to_json(plan: Plan, progress: StudyProgress, costs: PlanCosts) -> dict[str, Any]:
    """Return the lock file's content, with the plan's progress and costs here and now."""
    content = plan_to_json(plan)
    for arm, entry in zip(plan.arms, content["arms"], strict=True):
        for run in entry["runs"]:
            run["state"] = progress.state(run["id"])
            run["id"] = run["id"] or None
        config = asdict(arm.config.with_seed(arm.runs[0].seed))
        del config["seed"]
        entry |= {
            "config": config,
            "resources": asdict(arm.resources),
            "batches": {k: v for k, v in asdict(arm.batches).items() if not k.endswith("_every_steps")},
            "schedule": schedule_text(arm.config.training),
            "parameters": None if arm.size is None else arm.size.parameters,
            "layers": [asdict(group) for group in _layer_groups(arm)],
            "coverage": None if arm.coverage is None else arm.coverage.as_json(),
            "flops_per_token": None if arm.size is None else arm.size.flops_per_token,
            "flops_per_run": None if arm.size is None else arm.size.flops_per_token * arm.batches.tokens,
            "seconds_per_run": costs.run_seconds.get(arm.name),
            "seconds_are": costs.ground.get(arm.name),
        }
    content["missing"] = [str(problem) for problem in plan.missing]
    content["folded"] = [{"name": c.name, "into": c.into, "reason": c.reason} for c in plan.folded]
    shown = ("wall_seconds", "cores", "storage_bytes")
    content["estimate"] = {name: getattr(costs, name) for name in shown}
    content["estimate"]["shared_tokens"] = sum(costs.shared_tokens.values())
    return content


def _show(plan: Plan, progress: StudyProgress, figures: Iterable[str], width: int, *, all_runs: bool) -> None:
    """Print a plan for people."""
    description = f": {' '.join(plan.description.split())}" if plan.description else ""
    click.echo(click.style(plan.study, bold=True) + description)
    click.echo(f"baseline {plan.baseline}; {_target_text(plan)}")
    seeds = [run.seed for run in plan.arms[0].runs]
    shown = ", ".join(map(str, seeds[:8])) + (f", … ({len(seeds)} in all)" if len(seeds) > 8 else "")
    click.echo(f"seeds {shown}{', paired' if plan.paired_seeds else ''}\n")
    click.echo(_arms_table(plan, progress, width) + "\n")
    for line in figures:
        click.echo(line)
    for title, cells in (("folded", plan.folded), ("dropped", plan.dropped)):
        if cells:
            click.echo(f"\n{title}: {len(cells):,} {'cell' if len(cells) == 1 else 'cells'} of the grid")
        for cell in cells:
            click.echo(f"  {cell.name}: {cell.reason}")
    if plan.missing:
        click.echo("\nno ids: a run's id is a hash of its data, too, and they cannot be used as they are:")
    else:
        click.echo("\n" + (_runs_table(plan, progress, width) if all_runs else _ids_table(plan, width)))


def _target_text(plan: Plan) -> str:
    if plan.target is None:
        return "no target: final losses are compared (`ablate pilot` says which target to take)"
    value, is_loss = f"{plan.target.value:g}", plan.target.kind == "val_loss"
    target = f"validation loss {value} nats per token" if is_loss else f"perplexity {value}"
    crossing = "confirmed crossing" if plan.target.crossing == "confirmed" else "first evaluation"
    return f"target {target} ({crossing})"


def _dry_runs(plan: Plan) -> list[dict[str, int]]:
    """Dry-run every arm's model by shapes."""
    from ablate.train.dry import dry_run

    found = []
    for arm in plan.arms:
        config = arm.config.with_seed(arm.runs[0].seed)
        try:
            found.append(asdict(dry_run(config, arm.resources.devices_per_run)))
        except (ValueError, UserError) as error:
            raise UserError(f"arm '{arm.name}': {error}") from None
    return found


def _layer_groups(arm: PlannedArm) -> list[LayerGroup]:
    return _groups(arm.layers, arm.config.recipe, arm.batches.tokens)


@lru_cache(maxsize=256)  # the cells of a grid share most of theirs
def _groups(layers: tuple[LinearLayer, ...], recipe: Recipe, total_tokens: int) -> list[LayerGroup]:
    return layer_groups(recipe, layer_places(layers).values(), total_tokens)


def _layers_table(plan: Plan, width: int) -> str:
    rows = [
        ("" if place else arm.name, " ".join(group.names), str(group.count), group.recipe)
        for arm in plan.arms
        for place, group in enumerate(_layer_groups(arm))
    ]
    table = format_table(("arm", "linear layers", "n", "carry"), rows, width=width)
    covered = [f"{arm.name}: {arm.coverage}" for arm in plan.arms if arm.coverage is not None]
    return "\n\n".join([table, *covered])


def _arms_table(plan: Plan, progress: StudyProgress, width: int) -> str:
    rows = []
    for arm in plan.arms:
        own = "; ".join(
            f"{field.rpartition('.')[2]} {_value(pair[1])}" for field, pair in arm.differs.items()
        )
        differs = "(baseline)" if arm.name == plan.baseline else own
        rows.append((arm.name, arm.recipe, differs, _states(progress, (run.id for run in arm.runs))))
    return format_table(("arm", "recipe", "differs from the baseline in", "runs"), rows, width=width)


def _figures(
    plan: Plan, progress: StudyProgress, costs: PlanCosts, elsewhere: Mapping[str, str]
) -> list[str]:
    tokens = sum(arm.batches.tokens * len(arm.runs) for arm in plan.arms)
    ids = [run.id for _, run in plan.runs()]
    taken = f"of the results {taken_text(elsewhere)}: same configuration, same code"
    figures = {
        "tuning": _tuning_lines(plan, costs.cores),
        "batch": _each(plan, _batch_text),
        "budget": _each(plan, _budget_text),
        "schedule": _each(plan, lambda arm: schedule_text(arm.config.training)),
        "model": _each(plan, _model_text),
        "layers": _each(plan, _carried_text),
        "seeds": _seeds_text(plan),
        "stop": _stop_text(plan),
        "fork": _fork_text(plan),
        "runs": [f"{len(ids):,} ({_states(progress, ids)}), {tokens:,} tokens in all"],
        "": [*([taken] if elsewhere else []), *_shared_text(plan, progress, costs)],
        "time": [_time_text(costs)],
        "storage": [f"about {_bytes(costs.storage_bytes)}, without the token cache"],
    }
    return [
        f"{'' if place else name:<9} {text}"
        for name, texts in figures.items()
        for place, text in enumerate(texts)
    ]


def _tuning_lines(plan: Plan, cores: int) -> list[str]:
    """Return the budget of tuning, and what was found or that it comes first."""
    tuning = plan.tune
    if tuning is None:
        return []
    asked = [(group.name, n, group.shared) for group in tuning.groups for n in range(tuning.trials)]
    trials = trial_plan(plan, tuning, asked)
    runs, budget = sum(len(arm.runs) for arm in trials.arms), trials.arms[0].batches.tokens
    groups = f"each of {len(tuning.groups)} groups" if len(tuning.groups) > 1 else "the one group"
    most = "at most " if tuning.prune else ""
    lines = [f"{name} {range_text(field)}" for name, field in tuning.fields.items()]
    lines.append(f"{tuning.trials} trials of {budget:,} tokens for {groups}, by {tuning.sampler}")
    lines.append(f"{runs:,} runs, {most}{runs * budget:,} tokens, before the runs of the arms")
    if tuning.is_done:
        return [*lines, *(f"{group.name}: {values_text(group.chosen or {})}" for group in tuning.groups)]
    seconds = estimate(trials, StudyProgress(states={}, tokens_per_sec={}), cores=cores).wall_seconds
    about = "a time not known" if seconds is None else f"about {duration_text(seconds)} (modelled)"
    lines.append(f"{about}, not in the time below")
    return [*lines, "not done yet: arms at the values found come on top of those above"]


def _stop_text(plan: Plan) -> list[str]:
    """Say when an arm's other runs are not needed, with the nominal level of each look."""
    if plan.stop is None:
        return []
    from ablate.reports.words import words
    from ablate.results.stop_rule import levels_of

    text, rule = [], plan.stop
    if rule.diverged is not None:
        text.append(f"an arm after {rule.diverged} diverged {'run' if rule.diverged == 1 else 'runs'}")
    if rule.settled is not None:
        first, last = rule.settled.looks[0], rule.settled.looks[-1]
        levels = words.levels(levels_of(rule.settled))
        text.append(f"an arm that is settled: looks after each of {first} to {last} seeds, at {levels}")
        text += _expected_text(plan, rule.settled)
    return text


def _seeds_text(plan: Plan) -> list[str]:
    """Say what so many seeds, and more, would find."""
    if not plan.paired_seeds or (plan.stop is not None and plan.stop.settled is not None):
        return []
    seeds, others = len(plan.arms[0].runs), max(1, len(plan.arms) - 1)
    wanted = [seeds, *[n for n in (2, 3, 5, 8) if n > seeds][:2]]
    found = {n: cost_found(n, others, moderated=plan.intervals == "moderated") for n in wanted}
    costs = [f"{n} find a cost of {cost:.0%}" for n, cost in found.items() if cost is not None]
    spread = f"pairs of runs that spread by {SPREAD:.1%}"
    return [f"{', '.join(costs)} in 4 of 5 comparisons ({spread})"]


def _expected_text(plan: Plan, rule: Settled) -> list[str]:
    """Say what seeds until settled take at least, as expected, and at most."""
    from ablate.results.stop_rule import expected_seeds

    def tokens(seeds: float) -> str:
        return f"{sum(arm.batches.tokens for arm in plan.arms) * seeds:,.0f} tokens"

    others = max(1, len(plan.arms) - 1)
    margin = None if plan.target is None else plan.target.within
    expected = {
        cost: expected_seeds(rule, cost, SPREAD, arms=others, margin=margin) for cost in (0.05, 0.1, 0.2)
    }
    listed = ", ".join(f"{seeds:.1f} at a cost of {cost:.0%}" for cost, seeds in expected.items())
    spread = f"simulated, pairs of runs that spread by {SPREAD:.1%}"
    least, usual, most = (tokens(seeds) for seeds in (rule.looks[0], expected[0.1], rule.looks[-1]))
    return [
        f"at least {least}, {usual} if arms cost 10%, at most {most}",
        f"expected seeds an arm: {listed} ({spread})",
    ]


def _fork_text(plan: Plan) -> list[str]:
    """Say which arms start from another's state, and what their cost is then."""
    places: dict[str, list[str]] = {}
    for arm in plan.arms:
        if arm.fork is not None:
            step = arm.fork.tokens // arm.batches.tokens_per_step
            place = f"from {arm.fork.arm} after {arm.fork.tokens:,} tokens (step {step:,})"
            places.setdefault(place, []).append(arm.name)
    said = ["token costs count from the fork: what an arm costs from there on"] if places else []
    return [*(f"{names_text(names)} {place}" for place, names in places.items()), *said]


def _shared_text(plan: Plan, progress: StudyProgress, costs: PlanCosts) -> list[str]:
    """Say what is trained once for several runs."""
    if not (shared := costs.shared_tokens):
        return []
    to_do = sum(arm.batches.tokens for arm, run in plan.runs() if progress.state(run.id) not in END_STATES)
    saved = sum(shared.values())
    runs = "1 run begins" if len(shared) == 1 else f"{len(shared):,} runs begin"
    text = f"{runs} with steps that another trains, to the same bits: {saved:,} tokens less"
    return [f"{text} ({100 * saved / to_do:.0f} % of those to do)"]


def _batch_text(arm: PlannedArm) -> str:
    training, batches = arm.config.training, arm.batches
    text = f"{training.batch_size} sequences × {training.seq_len} tokens = {batches.tokens_per_step:,} a step"
    if batches.micro_batches > 1:
        of = training.batch_size // batches.micro_batches
        text += f", in {batches.micro_batches} micro-batches of {of}"
    if arm.resources.devices_per_run > 1:
        text += f", on {arm.resources.devices_per_run} devices"
    return text


def _budget_text(arm: PlannedArm) -> str:
    batches = arm.batches
    return f"{batches.tokens:,} tokens a run in {batches.steps:,} steps, {batches.evals:,} evaluations"


def _model_text(arm: PlannedArm) -> str:
    model = arm.config.model
    if arm.size is None:
        return f"not known: {arm.config.trainer} builds it, and the study has no model"
    parameters = f"{parameters_text(arm.size.parameters)} parameters"
    if not model.is_built_in:
        start = "a checkpoint's weights" if model.pretrained else "random weights"
        name = f"{model.hf} with {start}" if model.hf is not None else model.function
        return f"{name}, {len(arm.layers)} linear layers: {parameters}"
    layers = "1 layer" if model.layers == 1 else f"{model.layers} layers"
    ffn = f"ffn {model.ffn}"
    if model.experts is not None:
        ffn = f"{model.experts} experts of ffn {model.ffn}, {model.experts_per_token} a token"
    kind = "" if model.architecture == "llama" else f"{model.architecture}, "
    return f"{kind}width {model.width}, {layers}, {model.heads} heads, {ffn}: {parameters}"


def _carried_text(arm: PlannedArm) -> str:
    if arm.size is None:
        return "not known"
    groups = _layer_groups(arm)
    carrying = sum(group.count for group in groups if group.recipe != _HIGH_PRECISION)
    text = f"{carrying or 'none'} of {len(arm.layers)} linear layers in low precision"
    if arm.coverage is not None and (hidden := arm.coverage.out_of_reach):
        text += f", {len(hidden)} {'matrix' if len(hidden) == 1 else 'matrices'} out of reach"
    return text


def _time_text(costs: PlanCosts) -> str:
    if costs.wall_seconds is None:
        return "not known before a run is finished: the study does not describe the model"
    if not costs.wall_seconds:
        return "nothing left to run"
    where = "1 core" if costs.cores == 1 else f"{costs.cores} cores"
    rate = f"{FLOPS_PER_CPU_CORE / 1e9:g} GFLOP/s a core"
    if costs.uses_gpu:
        where, rate = "one GPU job at a time", f"{FLOPS_PER_GPU / 1e12:g} TFLOP/s a GPU"
    ground = "measured where runs are finished, else modelled and scaled to those"
    if set(costs.ground.values()) == {"measured"}:
        ground = "from the measured speed of finished runs"
    elif set(costs.ground.values()) == {"modelled"}:
        ground = f"modelled: {rate} assumed; emulated formats take longer"
    return f"about {duration_text(costs.wall_seconds)} on {where} ({ground})"


def _ids_table(plan: Plan, width: int) -> str:
    fits = max(1, (width - 34) // 17)
    rows = []
    for arm in plan.arms:
        more = f" +{len(arm.runs) - fits}" if len(arm.runs) > fits else ""
        rows.append((arm.name, " ".join(run.id for run in arm.runs[:fits]) + more))
    return format_table(("arm", "ids of its runs (--runs lists all)"), rows, width=width)


def _runs_table(plan: Plan, progress: StudyProgress, width: int) -> str:
    rows = [(run.id, arm.name, str(run.seed), progress.state(run.id)) for arm, run in plan.runs()]
    return format_table(("id", "arm", "seed", "state"), rows, width=width)


def _each(plan: Plan, text_of: Callable[[PlannedArm], str]) -> list[str]:
    """Return the texts of all arms: one line if they agree, else one for each group with its arms."""
    groups: dict[str, list[str]] = {}
    for arm in plan.arms:
        groups.setdefault(text_of(arm), []).append(arm.name)
    if len(groups) == 1:
        return list(groups)
    lines = []
    for text, names in list(groups.items())[:_MAX_GROUPS]:
        lines.append(f"{text} ({names_text(names)})")
    if len(groups) > _MAX_GROUPS:
        lines.append(f"and {len(groups) - _MAX_GROUPS} others (--json lists all)")
    return lines


def _states(progress: StudyProgress, ids: Iterable[str]) -> str:
    names = {"pending": "to do", "finished": "done"}
    counts = Counter(progress.state(run_id) for run_id in ids)
    return ", ".join(f"{count:,} {names.get(state, state)}" for state, count in counts.items())


def _value(value: Any) -> str:
    if isinstance(value, list):
        return "+".join(_value(item) for item in value) or "none"
    if isinstance(value, dict):
        return " ".join(f"{key} {_value(item)}" for key, item in value.items()) or "default"
    if value is None:
        return "default"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)


def _bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= 0.9995 * size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
