"""What ``ablate plan`` prints: the runs of a study, with nothing started."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ablate.backends.device import NO_COMPILER, cpp_compiler
from ablate.base.counts import count_text
from ablate.base.errors import UserError
from ablate.cli.common import deliver, format_table, names_text
from ablate.cli.plan_hardware import HardwareNeeds, hardware_lines, hardware_needs
from ablate.execute.command import run_values
from ablate.modelled.speed import HARDWARE
from ablate.plan import build_plan, estimate, known_plan, read_progress, warnings_of
from ablate.plan.estimate import (
    SPREAD,
    cost_found,
    duration_text,
    pair_spread,
    seeds_for,
)
from ablate.plan.layers import LayerGroup, layer_groups
from ablate.plan.shares import is_auto, sharing_text, this_machine
from ablate.plan.tuning import range_text, values_text
from ablate.recipes.place import idle_roles
from ablate.recipes.stacks import STACKS, flags_for
from ablate.run.architecture import layer_places
from ablate.run.command import Command, lacks_proof, shell_line
from ablate.run.command_files import result_files
from ablate.run.schedule import plan_steps, schedule_text
from ablate.store import StudyStore
from ablate.store.plan_file import plan_to_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ablate.plan import Plan, PlanCosts, PlannedArm, StudyProgress
    from ablate.study import Study

_MAX_GROUPS = 4
_MAX_SEEDS = 8
_CROSSINGS = {"confirmed": "confirmed crossing", "first_eval": "first evaluation"}
_FIGURES = (
    "tuning", "batch", "budget", "work", "schedule", "model", "layers", "command", "its files", "proof",
    "flags", "seeds", "fork", "runs", "devices", "step", "time", "storage",
)  # fmt: skip
"""All figures, in the order in which they are shown."""
_TARGETS = {"val_loss": "validation loss {:g} {unit}", "perplexity": "perplexity {:g}"}


@dataclass(frozen=True, kw_only=True)
class _Shown:
    """A plan with all that is known of it. ``devices``: on which it runs, where that can be said.

    ``dry_runs``: what trying each arm showed; empty without ``--dry-run``. ``needs``: None if nobody asks.
    """

    plan: Plan
    progress: StudyProgress
    costs: PlanCosts
    devices: str | None
    dry_runs: dict[str, dict[str, Any]]
    needs: HardwareNeeds | None


def show_plan(
    study: Study,
    *,
    as_json: bool,
    dry_run: bool,
    hardware: tuple[str, ...],
    storage: Path,
    **lists: bool,
) -> None:
    """Print the plan of a study; the other parameters are the options of the verb.

    Raises:
        UserError: data are missing; all that does not depend on them is printed before.
    """
    plan = build_plan(study, without_data=True)
    store = StudyStore(storage / plan.study)
    for warning in warnings_of(study, is_new=not store.path.exists()):
        click.echo(warning, err=True)
    plan = known_plan(plan, store)
    if not hardware and any(arm.resources.num_gpus for arm in plan.arms):
        hardware = HARDWARE
    needs = None
    if hardware or as_json:
        needs = hardware_needs(plan, dict.fromkeys(hardware))
    progress = read_progress(plan, store)
    dry_runs = {}
    if dry_run:
        dry_runs = {arm.name: _dry_run(arm) for arm in plan.arms}
        if not plan.missing:
            progress = _with_timed_steps(plan, progress)
    devices = sharing_text(study, plan.arms, this_machine)
    if is_auto(study) and not any(arm.resources.num_gpus for arm in plan.arms):
        devices = "the CPU: resources.gpus is auto, and this machine has no GPU that torch can use"
    shown = _Shown(
        plan=plan,
        progress=progress,
        costs=estimate(plan, progress, cores=os.cpu_count() or 1),
        devices=devices,
        dry_runs=dry_runs,
        needs=needs,
    )
    content = _content(shown) if as_json else None
    deliver(content, _lines(shown, **lists), as_json=as_json)
    if plan.missing:
        raise UserError(*plan.missing)


def _dry_run(arm: PlannedArm) -> dict[str, Any]:
    """Try an arm's model, command or trainer.

    Raises:
        UserError: it does not fit.
    """
    from ablate.execute.own_trainer import check_call
    from ablate.train.probe import dry_run

    config = arm.config.with_seed(arm.runs[0].seed)
    if isinstance(config.trainer, Command):
        from ablate.execute.command import dry_run as try_command

        return try_command(arm.name, config, max(1, int(arm.resources.num_gpus)))
    entry: dict[str, Any] = {}
    try:
        if arm.size is not None:
            entry |= asdict(dry_run(config, arm.resources.devices_per_run))
        if config.trainer is not None:
            check_call(config.trainer)
            entry["trainer"] = config.trainer
    except (ValueError, UserError) as error:
        raise UserError(f"arm '{arm.name}': {error}") from None
    return entry


def _with_timed_steps(plan: Plan, progress: StudyProgress) -> StudyProgress:
    from ablate.cli.display import ConsoleListener
    from ablate.workflow.pilot import with_timed_steps

    try:
        progress, _ = with_timed_steps(plan, progress, ConsoleListener(err=True))
    except UserError as error:  # the arms may be meant for another machine
        click.echo(f"not timed here: {error}", err=True)
    return progress


def _content(shown: _Shown) -> dict[str, Any]:
    """Return the lock file's content, with present progress and with costs on this machine."""
    plan = shown.plan
    costs = shown.costs
    assert shown.needs is not None
    content = plan_to_json(plan)
    for arm, entry in zip(plan.arms, content["arms"], strict=True):
        for run in entry["runs"]:
            run["state"] = shown.progress.state(run["id"])
            run["id"] = run["id"] or None
        flops = arm.size and arm.size.flops_per_token
        entry |= {
            "config": asdict(arm.config),
            "resources": asdict(arm.resources),
            "batches": asdict(arm.batches),
            "schedule": schedule_text(arm.config.training),
            "parameters": arm.size and arm.size.parameters,
            "layers": [asdict(group) for group in _layer_groups(arm)],
            "coverage": arm.coverage and arm.coverage.as_json(),
            "flops_per_token": flops,
            "flops_per_run": flops and flops * arm.batches.tokens,
            "seconds_per_run": costs.run_seconds.get(arm.name),
            "seconds_are": costs.ground.get(arm.name),
            "on_hardware": shown.needs.arms[arm.name],
        }
        if arm.name in shown.dry_runs:
            entry["dry_run"] = shown.dry_runs[arm.name]
    folded = [
        {"name": name, "into": into, "reason": _folded_text(into)}
        for name, into in plan.folded.items()
    ]
    shared_tokens = sum(costs.shared_tokens.values())
    return content | {
        "missing": [str(problem) for problem in plan.missing],
        "folded": folded,
        "estimate": asdict(costs) | {"shared_tokens": shared_tokens},
        "on_hardware": shown.needs.study,
    }


def _folded_text(into: str) -> str:
    return f"the same configuration as '{into}'"


def _layer_groups(arm: PlannedArm) -> list[LayerGroup]:
    return layer_groups(arm.config.recipe, arm.layers, arm.batches.tokens)


def _lines(shown: _Shown, *, layers: bool, all_runs: bool) -> Iterator[str]:
    plan = shown.plan
    yield from _head_lines(plan, shown.progress)
    for name, texts in _figures(shown).items():
        heading = name
        for text in texts:
            yield f"{heading:<9} {text}"
            heading = ""
    if shown.needs is not None:
        yield from hardware_lines(shown.needs)
    if plan.folded:
        yield f"\nfolded cells of the grid: {len(plan.folded):,}"
        for name, into in plan.folded.items():
            yield f"  {name}: {_folded_text(into)}"
    if plan.dropped:
        yield f"\ndropped cells of the grid: {len(plan.dropped):,}"
        for cell in plan.dropped:
            yield f"  {cell.name}: {cell.reason}"
    if all_runs:
        rows = []
        for arm, run in plan.runs():
            state = shown.progress.state(run.id)
            rows.append((run.id, arm.name, str(run.seed), state))
        yield f"\n{format_table(('id', 'arm', 'seed', 'state'), rows)}"
    if layers:
        yield f"\n{_layers_table(plan)}"
        for arm in plan.arms:
            if arm.coverage is not None:
                yield f"\n{arm.name}: {arm.coverage}"
    for name, tried in shown.dry_runs.items():
        for text in _dry_run_texts(tried):
            yield f"dry run  {name}: {text}"
    if plan.missing:
        yield "\nno ids: a run's id is a hash of its data, too, and they cannot be used as they are:"


def _head_lines(plan: Plan, progress: StudyProgress) -> Iterator[str]:
    description = " ".join((plan.description or "").split())
    yield f"{plan.study}: {description}".removesuffix(": ")
    target = "no target: final losses are compared (`ablate pilot` says which target to take)"
    if plan.target is not None:
        value = _TARGETS[plan.target.kind].format(plan.target.value, unit=plan.unit)
        target = f"target {value} ({_CROSSINGS[plan.target.crossing]})"
    yield f"baseline {plan.baseline}; {target}"
    seeds = [run.seed for run in plan.arms[0].runs]
    text = ", ".join(map(str, seeds[:_MAX_SEEDS]))
    if len(seeds) > _MAX_SEEDS:
        text += f", … ({len(seeds)} in all)"
    if plan.paired_seeds:
        text += ", paired"
    yield f"seeds {text}\n"
    rows = []
    for arm in plan.arms:
        values = {
            key.rpartition(".")[2]: value for key, (_, value) in arm.differs.items()
        }
        # As a study file writes them, without the outer braces.
        differences = json.dumps(values, ensure_ascii=False).replace('"', "")[1:-1]
        states = _states_text(progress, (run.id for run in arm.runs))
        rows.append((arm.name, arm.recipe, differences or "(baseline)", states))
    header = ("arm", "recipe", "differs from the baseline in", "runs")
    yield f"{format_table(header, rows)}\n"


def _states_text(progress: StudyProgress, ids: Iterable[str]) -> str:
    counts = Counter(progress.state(run_id) for run_id in ids)
    return ", ".join(f"{count:,} {state}" for state, count in counts.items())


def _layers_table(plan: Plan) -> str:
    """List the layers of each arm; an arm's name, and a recipe that repeats, are written once."""
    rows = []
    for arm in plan.arms:
        arm_name = arm.name
        recipe_above = None
        for group in _layer_groups(arm):
            recipe = "" if group.recipe == recipe_above else group.recipe
            role = group.role or "not known"
            rows.append(
                (arm_name, " ".join(group.names), str(group.count), role, recipe)
            )
            arm_name = ""
            recipe_above = group.recipe
    return format_table(("arm", "linear layers", "n", "role", "carry"), rows)


def _dry_run_texts(tried: dict[str, Any]) -> Iterator[str]:
    if "last_line" in tried:
        yield f"the command ended with exit code 0; its last line: {tried['last_line']}"
    if "parameters" in tried:
        yield (
            f"{tried['parameters']:,} parameters, {tried['linear_layers']} linear layers; all shapes fit, "
            f"forward and backward, with {tried['tokens']:,} tokens; memory is not tried"
        )
    if "trainer" in tried:
        yield f"{tried['trainer']} can be called as a run calls it; it was not tried"


def _figures(shown: _Shown) -> dict[str, list[str]]:
    """Write the figures of the study, by name; a figure without texts is not shown."""
    plan = shown.plan
    figures: dict[str, list[str]] = {name: [] for name in _FIGURES}
    figures["tuning"] = _tuning_texts(plan)
    unproven = []
    emulates = False
    by_arm = {arm.name: _arm_texts(plan, arm) for arm in plan.arms}
    for arm in plan.arms:
        command = arm.config.trainer
        if isinstance(command, Command):
            figures["command"].append(
                f"{arm.name}: {_command_text(plan, arm, command)}"
            )
            figures["its files"] += map(str, result_files(command))
            figures["flags"] += _flags_texts(arm, command)
        if lacks_proof(command, arm.config.recipe):
            unproven.append(arm.name)
        if arm.fork is not None:
            figures["fork"].append(
                f"{arm.name} from {arm.fork.arm} after {arm.fork.tokens:,} tokens; token costs count from there"
            )
        emulates |= not arm.resources.num_gpus and arm.recipe != "bf16"
    are_commands = len(figures["command"]) == len(plan.arms)
    for name in by_arm[plan.baseline]:
        if not are_commands or name in ("batch", "budget", "step"):
            texts = {arm: by_name[name] for arm, by_name in by_arm.items()}
            figures[name] = _by_arms(texts)
    figures["its files"] = list(dict.fromkeys(figures["its files"]))
    if unproven:
        figures["proof"] = [
            f"nothing in the log of {names_text(unproven)} proves that low precision ran (trainer.expect)"
        ]
    figures["seeds"] = _seeds_texts(plan)
    figures["runs"] = _runs_texts(shown)
    if shown.devices:
        figures["devices"] = [shown.devices]
    figures["time"] = [_time_text(shown)]
    if emulates and cpp_compiler() is None:
        figures["time"].append(NO_COMPILER)
    figures["storage"] = [
        f"about {shown.costs.storage_bytes / 1e6:,.1f} MB, without the token cache"
    ]
    return figures


def _flags_texts(arm: PlannedArm, command: Command) -> list[str]:
    """Write what has to be known of flags that an arm has from a table, such as how they differ."""
    if command.recipes not in STACKS:
        return []
    steps = plan_steps(arm.config.training).steps
    flags = flags_for(arm.config.recipe, command.recipes, steps=steps)
    return [f"{arm.name}: {note}" for note in flags.notes]


def _runs_texts(shown: _Shown) -> list[str]:
    tokens = sum(arm.batches.tokens * len(arm.runs) for arm in shown.plan.arms)
    ids = [run.id for _, run in shown.plan.runs()]
    texts = [
        f"{len(ids):,} ({_states_text(shown.progress, ids)}), {tokens:,} tokens in all"
    ]
    shared = shown.costs.shared_tokens
    if shared:
        texts.append(
            f"{len(shared):,} begin with steps that another trains, to the same bits: "
            f"{sum(shared.values()):,} tokens less"
        )
    return texts


def _time_text(shown: _Shown) -> str:
    costs = shown.costs
    grounds = costs.ground.values()
    if costs.wall_seconds == 0:
        return "nothing left to run"
    if costs.wall_seconds is None or "modelled" in grounds:
        return "not known before a step is measured here: by --dry-run, `ablate pilot` or the first run"
    if not costs.uses_gpu:
        device = f" on {costs.cores} CPU cores"
    elif shown.devices:
        device = " on one GPU"
    else:
        device = ", one GPU job at a time"
    about = "about"
    ground = "steps measured here, and Ray's start"
    if "scaled" in grounds:
        about = "at least"
        ground += "; --dry-run times the arms that have not run, emulated ones longer"
    return f"{about} {duration_text(costs.wall_seconds)}{device} ({ground})"


def _tuning_texts(plan: Plan) -> list[str]:
    tuning = plan.tuning
    if tuning is None:
        return []
    num_arms = sum(len(group.arms) for group in tuning.groups)
    num_runs = tuning.trials * len(tuning.seeds) * num_arms
    texts = [f"{name} {range_text(field)}" for name, field in tuning.fields.items()]
    texts.append(
        f"{tuning.trials} trials of {tuning.tokens:,} tokens for each of {len(tuning.groups)} groups, by "
        f"{tuning.sampler}: {num_runs:,} runs, at most {num_runs * tuning.tokens:,} tokens, "
        "before the runs of the arms"
    )
    if not tuning.done:
        texts.append(
            "not done yet; arms at the values found come on top of those above"
        )
        return texts
    chosen = {group.name: group.chosen or {} for group in tuning.groups}
    return texts + [f"{name}: {values_text(chosen[name])}" for name in chosen]


_COST = 0.05
"""The token cost of which the seeds are said."""


def _seeds_texts(plan: Plan) -> list[str]:
    """Say which costs the seeds, and more seeds, would find, and when an arm stops early."""
    texts = []
    rule = plan.stop
    if rule is not None and rule.diverged is not None:
        texts.append(f"an arm stops after diverged runs: {rule.diverged}")
    if rule is not None and rule.settled is not None:
        from ablate.results.stop_rule import level_of

        looks = rule.settled.looks
        texts.append(
            f"an arm stops where it is settled: looks after each of {looks[0]} to {looks[-1]}, at "
            f"{level_of(rule):.1%}"
        )
    elif plan.paired_seeds:
        num_seeds = len(plan.arms[0].runs)
        num_others = max(1, len(plan.arms) - 1)
        spread = pair_spread(plan)
        larger = [count for count in (2, 3, 5, 8) if count > num_seeds]
        costs = []
        for count in [num_seeds, *larger[:2]]:
            cost = cost_found(
                count, num_others, moderated=plan.is_moderated, spread=spread
            )
            if cost is not None and round(cost, 2) != _COST:
                costs.append(f"{count} find a cost of {cost:.0%}")
        seeds = seeds_for(_COST, num_others, moderated=plan.is_moderated, spread=spread)
        costs.append(f"{seeds or 'over 30'} find one of {_COST:.0%}")
        estimator = "local fits" if spread == SPREAD else "interpolation"
        texts.append(
            f"{', '.join(costs)} in 4 of 5 comparisons (where pairs of runs spread by {spread:.1%}, as FP4 "
            f"arms of docs/findings do by {estimator})"
        )
    return texts


def _command_text(plan: Plan, arm: PlannedArm, command: Command) -> str:
    """Write the line that starts an arm's first run."""
    run = arm.runs[0]
    values = run_values(
        arm.config.with_seed(run.seed),
        run_dir=Path(f"RUNS/{plan.study}/runs/{run.id}"),
        num_devices=max(1, int(arm.resources.num_gpus)),
    )
    return shell_line(command, arm.config.recipe, values)


def _arm_texts(plan: Plan, arm: PlannedArm) -> dict[str, str]:
    """Write the figures of one arm, by name."""
    batches = arm.batches
    training = arm.config.training
    num_devices = arm.resources.devices_per_run
    batch = f"{training.batch_size} sequences × {training.seq_len} tokens = {batches.tokens_per_step:,} a step"
    if batches.micro_batches > 1:
        micro_batch_size = training.batch_size // batches.micro_batches
        batch += f", in {batches.micro_batches} micro-batches of {micro_batch_size}"
    if num_devices > 1:
        batch += f", on {num_devices} devices"
    texts = {
        "batch": batch,
        "budget": f"{batches.tokens:,} tokens a run in {batches.steps:,} steps",
    }
    builder = arm.config.trainer
    if isinstance(builder, Command):
        builder = "the command"
    else:
        texts["budget"] += f", {batches.evals:,} evaluations"
    texts["schedule"] = schedule_text(training)
    texts["model"] = f"not known: {builder} builds it, and the study has no model"
    texts["work"] = texts["layers"] = "not known"
    if arm.size is not None:
        texts["work"] = f"{arm.size.flops_per_token * batches.tokens:.3g} FLOPs a run"
        parameters = count_text(arm.size.parameters, " ")
        texts["model"] = f"{arm.config.model.summary}: {parameters} parameters"
        texts["layers"] = _layers_text(arm)
    if any(arm.resources.num_gpus for arm in plan.arms):
        texts["step"] = _step_text(plan, arm)
    return texts


def _layers_text(arm: PlannedArm) -> str:
    """Say how many layers are in low precision, and what the recipe does not reach."""
    groups = [group for group in _layer_groups(arm) if group.recipe != "bf16"]
    num_low = sum(group.count for group in groups)
    text = f"{num_low} of {len(arm.layers)} linear layers in low precision"
    if arm.coverage is not None and arm.coverage.out_of_reach:
        text += f"; matrices out of reach: {len(arm.coverage.out_of_reach)}"
    if idle := idle_roles(arm.config.recipe, layer_places(arm.layers)):
        text += f"; no linear layer has the role {', '.join(idle)}"
    return text


def _step_text(plan: Plan, arm: PlannedArm) -> str:
    """Say how a step on a GPU is launched, and why."""
    from ablate.train.graphed import why_eager

    if arm.config.trainer is not None:
        return "the trainer's own"
    reason = why_eager(
        arm.config,
        "cuda" if arm.resources.num_gpus else "cpu",
        devices=arm.resources.devices_per_run,
        observed=plan.diagnostics is not None,
    )
    if reason is None:
        return "one CUDA graph where the device proves it"
    return f"eager, because {reason}"


def _by_arms(texts: dict[str, str]) -> list[str]:
    """Write one line if the texts of all arms agree, else one line for each group of arms."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, text in texts.items():
        names[text].append(name)
    if len(names) == 1:
        return list(names)
    lines = [f"{text} ({names_text(alike)})" for text, alike in names.items()]
    if len(lines) > _MAX_GROUPS:
        lines[_MAX_GROUPS:] = ["… (--json lists all)"]
    return lines
