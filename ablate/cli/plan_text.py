"""What ``ablate plan`` prints: the runs of a study, with nothing started, and needs of named hardware."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ablate.backends.device import NO_COMPILER, cpp_compiler
from ablate.base.errors import UserError
from ablate.cli.common import deliver, format_table, names_text
from ablate.execute.command import run_values
from ablate.modelled.hardware import PEAKS
from ablate.modelled.on_hardware import CPU, FITS_SHARE, PURPOSES, on_hardware
from ablate.modelled.speed import HARDWARE, ModelledFigure
from ablate.plan import build_plan, estimate, known_plan, read_progress, warnings_of
from ablate.plan.estimate import SPREAD, cost_found, duration_text, shared_tokens
from ablate.plan.layers import LayerGroup, layer_groups
from ablate.plan.shares import is_auto, sharing_text, this_machine
from ablate.plan.tuning import range_text, values_text
from ablate.recipes.place import idle_roles
from ablate.run.architecture import layer_places, parameters_text
from ablate.run.command import Command, lacks_proof, result_files, shell_line
from ablate.run.schedule import schedule_text
from ablate.store import StudyStore
from ablate.store.plan_file import plan_to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ablate.plan import Plan, PlanCosts, PlannedArm, StudyProgress
    from ablate.study import Study

    Entry = dict[str, Any]

_MAX_GROUPS = 4
_HIGH_PRECISION = "bf16"
"""Description of a layer that no recipe applies to."""
_CROSSINGS = {"confirmed": "confirmed crossing", "first_eval": "first evaluation"}
_TARGETS = {"val_loss": "validation loss {:g} {unit}", "perplexity": "perplexity {:g}"}
_ENDS = {"": "estimate", "_low": "low", "_high": "high"}
"""Suffixes of a key, for the estimate and for the ends of its 95 % range."""
_EMULATED = "modelled from an H200's measured factors"
_DRY_COMMAND = "dry run  {arm}: the command ended with exit code 0; its last line: {last_line}"
_DRY_RUN = (
    "dry run  {arm}: {parameters:,} parameters, {linear_layers} linear layers; all shapes fit, forward and "
    "backward, with {tokens:,} tokens; memory is not tried"
)
_UNPROVEN = "nothing in the log of {} proves that low precision ran (trainer.expect)"
_DRY_TRAINER = "dry run  {arm}: {trainer} can be called as a run calls it; it was not tried"


def show_plan(
    study: Study,
    as_json: bool,
    dry_run: bool,
    layers: bool,
    all_runs: bool,
    hardware: tuple[str, ...],
    storage: Path,
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
    for name in hardware:
        if name not in PEAKS:
            raise UserError(f"--hardware: no hardware '{name}' (expected {', '.join(PEAKS)})")
    usual = HARDWARE if any(arm.resources.num_gpus for arm in plan.arms) else ()
    named = dict.fromkeys(hardware or usual)
    progress = read_progress(plan, store)
    tried = _dry_runs(plan) if dry_run else []
    if dry_run and not plan.missing:
        from ablate.cli.display import ConsoleListener
        from ablate.workflow.pilot import with_timed_steps

        try:
            progress, _ = with_timed_steps(plan, progress, ConsoleListener(err=True))
        except UserError as error:  # the arms may be meant for another machine
            click.echo(f"not timed here: {error}", err=True)
    costs = estimate(plan, progress, cores=os.cpu_count() or 1)
    on_each, of_all = _on_hardware(plan, named) if named or as_json else ([], {})

    def lines() -> Iterator[str]:
        yield from _head(plan, progress)
        yield from _figures(plan, progress, costs, _devices_text(study, plan))
        if named:
            yield from _hardware_lines(plan, on_each, of_all)
        dropped = {cell.name: cell.reason for cell in plan.dropped}
        folded = {name: f"the same configuration as '{into}'" for name, into in plan.folded.items()}
        for title, cells in (("folded", folded), ("dropped", dropped)):
            if cells:
                yield f"\n{title} cells of the grid: {len(cells):,}"
            yield from (f"  {name}: {reason}" for name, reason in cells.items())
        if all_runs:
            listed = [(run.id, arm.name, str(run.seed), progress.state(run.id)) for arm, run in plan.runs()]
            yield "\n" + format_table(("id", "arm", "seed", "state"), listed)
        if layers:
            rows, before = [], ("", "")
            for arm in plan.arms:
                for group in _layer_groups(arm):
                    first = arm.name if arm.name != before[0] else ""
                    text = group.recipe if first or group.recipe != before[1] else ""
                    names, role = " ".join(group.names), group.role or "not known"
                    rows.append((first, names, str(group.count), role, text))
                    before = arm.name, group.recipe
            yield "\n" + format_table(("arm", "linear layers", "n", "role", "carry"), rows)
            yield from (f"\n{arm.name}: {arm.coverage}" for arm in plan.arms if arm.coverage is not None)
        for arm, found in zip(plan.arms, tried, strict=False):
            forms = {"last_line": _DRY_COMMAND, "parameters": _DRY_RUN, "trainer": _DRY_TRAINER}
            yield from (form.format(arm=arm.name, **found) for key, form in forms.items() if key in found)
        if plan.missing:
            yield "\nno ids: a run's id is a hash of its data, too, and they cannot be used as they are:"

    content = None
    if as_json:
        content = _content(plan, progress, costs) | {"on_hardware": of_all}
        for entry, where in zip(content["arms"], on_each, strict=True):
            entry["on_hardware"] = where
        for entry, found in zip(content["arms"], tried, strict=False):
            entry["dry_run"] = found
    deliver(content, lines(), as_json=as_json)
    if plan.missing:
        raise UserError(*plan.missing)


def _content(plan: Plan, progress: StudyProgress, costs: PlanCosts) -> dict[str, Any]:
    """Return the lock file's content, with present progress and with costs on this machine."""
    content = plan_to_json(plan)
    for arm, entry in zip(plan.arms, content["arms"], strict=True):
        for run in entry["runs"]:
            run["state"] = progress.state(run["id"])
            run["id"] = run["id"] or None
        flops = None if arm.size is None else arm.size.flops_per_token
        entry |= {
            "config": asdict(arm.config),
            "resources": asdict(arm.resources),
            "batches": asdict(arm.batches),
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
        "folded": [
            {"name": name, "into": into, "reason": f"the same configuration as '{into}'"}
            for name, into in plan.folded.items()
        ],
        "estimate": asdict(costs) | {"shared_tokens": sum(costs.shared_tokens.values())},
    }


def _dry_runs(plan: Plan) -> list[dict[str, Any]]:
    from ablate.execute.own_trainer import check_call
    from ablate.train.probe import dry_run

    found: list[dict[str, Any]] = []
    for arm in plan.arms:
        config = arm.config.with_seed(arm.runs[0].seed)
        if isinstance(config.trainer, Command):
            from ablate.execute.command import dry_run as try_command

            found.append(try_command(arm.name, config, max(1, int(arm.resources.num_gpus))))
            continue
        entry: dict[str, Any] = {}
        try:
            if arm.size is not None:
                entry |= asdict(dry_run(config, arm.resources.devices_per_run))
            if config.trainer is not None:
                check_call(config.trainer)
                entry["trainer"] = config.trainer
        except (ValueError, UserError) as error:
            raise UserError(f"arm '{arm.name}': {error}") from None
        found.append(entry)
    return found


def _layer_groups(arm: PlannedArm) -> list[LayerGroup]:
    return layer_groups(arm.config.recipe, arm.layers, arm.batches.tokens)


def _head(plan: Plan, progress: StudyProgress) -> Iterator[str]:
    yield f"{plan.study}: {' '.join((plan.description or '').split())}".removesuffix(": ")
    target = "no target: final losses are compared (`ablate pilot` says which target to take)"
    if plan.target is not None:
        value = _TARGETS[plan.target.kind].format(plan.target.value, unit=plan.unit)
        target = f"target {value} ({_CROSSINGS[plan.target.crossing]})"
    yield f"baseline {plan.baseline}; {target}"
    seeds = [run.seed for run in plan.arms[0].runs]
    shown = ", ".join(map(str, seeds[:8])) + (f", … ({len(seeds)} in all)" if len(seeds) > 8 else "")
    yield f"seeds {shown}{', paired' if plan.paired_seeds else ''}\n"
    rows = []
    for arm in plan.arms:
        values = {field.rpartition(".")[2]: own for field, (_, own) in arm.differs.items()}
        # As a study file writes them, without the outer braces.
        differs = json.dumps(values, ensure_ascii=False).replace('"', "")[1:-1]
        states = _states(progress, (run.id for run in arm.runs))
        rows.append((arm.name, arm.recipe, differs or "(baseline)", states))
    yield format_table(("arm", "recipe", "differs from the baseline in", "runs"), rows) + "\n"


def _devices_text(study: Study, plan: Plan) -> str | None:
    if is_auto(study) and not any(arm.resources.num_gpus for arm in plan.arms):
        return "the CPU: resources.gpus is auto, and this machine has no GPU that torch can use"
    return sharing_text(study, plan.arms, this_machine)


def _figures(plan: Plan, progress: StudyProgress, costs: PlanCosts, devices: str | None) -> Iterator[str]:
    tokens = sum(arm.batches.tokens * len(arm.runs) for arm in plan.arms)
    ids = [run.id for _, run in plan.runs()]
    runs = [f"{len(ids):,} ({_states(progress, ids)}), {tokens:,} tokens in all"]
    if shared := costs.shared_tokens:
        runs.append(
            f"{len(shared):,} begin with steps that another trains, to the same bits: "
            f"{sum(shared.values()):,} tokens less"
        )
    commands = [one for arm in plan.arms if isinstance(one := arm.config.trainer, Command)]
    told = ("batch", "budget") if len(commands) == len(plan.arms) else tuple(_OF_AN_ARM)
    time = "nothing left to run"
    grounds = costs.ground.values()
    if costs.wall_seconds is None or (costs.wall_seconds and "modelled" in grounds):
        time = "not known before a step is measured here: by --dry-run, `ablate pilot` or the first run"
    elif costs.wall_seconds:
        where = f" on {costs.cores} CPU cores"
        if costs.uses_gpu:
            where = " on one GPU" if devices else ", one GPU job at a time"
        about, ground = "about", "steps measured here, and Ray's start"
        if "scaled" in grounds:
            about, ground = (
                "at least",
                f"{ground}; --dry-run times the arms that have not run, emulated ones longer",
            )
        time = f"{about} {duration_text(costs.wall_seconds)}{where} ({ground})"
    unproven = [arm.name for arm in plan.arms if lacks_proof(arm.config.trainer, arm.config.recipe)]
    figures = {
        "tuning": _tuning_texts(plan),
        **{name: _each(plan, text_of) for name, text_of in _OF_AN_ARM.items() if name in told},
        "command": [f"{arm.name}: {text}" for arm in plan.arms if (text := _command_text(plan, arm))],
        "its files": [*dict.fromkeys(str(path) for one in commands for path in result_files(one))],
        "proof": [_UNPROVEN.format(names_text(unproven))] if unproven else [],
        "seeds": _seeds_texts(plan),
        "fork": [
            f"{arm.name} from {arm.fork.arm} after {arm.fork.tokens:,} tokens; token costs count from there"
            for arm in plan.arms
            if arm.fork is not None
        ],
        "runs": runs,
        "devices": [devices] if devices else [],
        "step": _step_texts(plan),
        "time": [time, *_slowed(plan)],
        "storage": [f"about {costs.storage_bytes / 1e6:,.1f} MB, without the token cache"],
    }
    for name, texts in figures.items():
        yield from (f"{'' if place else name:<9} {text}" for place, text in enumerate(texts))


def _step_texts(plan: Plan) -> list[str]:
    """Say how a step on a GPU is launched, and why."""
    if not any(arm.resources.num_gpus for arm in plan.arms):
        return []
    from ablate.train.graphed import why_eager

    def text_of(arm: PlannedArm) -> str:
        if arm.config.trainer is not None:
            return "the trainer's own"
        reason = why_eager(
            arm.config,
            "cuda" if arm.resources.num_gpus else "cpu",
            devices=arm.resources.devices_per_run,
            observed=plan.diagnostics is not None,
        )
        return "one CUDA graph where the device proves it" if reason is None else f"eager, because {reason}"

    return _each(plan, text_of)


def _slowed(plan: Plan) -> list[str]:
    """Say what makes emulation slow on this machine."""
    emulates = any(not arm.resources.num_gpus and arm.recipe != "bf16" for arm in plan.arms)
    return [NO_COMPILER] if emulates and cpp_compiler() is None else []


def _tuning_texts(plan: Plan) -> list[str]:
    tuning = plan.tuning
    if tuning is None:
        return []
    runs = tuning.trials * len(tuning.seeds) * sum(len(group.arms) for group in tuning.groups)
    texts = [f"{name} {range_text(field)}" for name, field in tuning.fields.items()]
    texts.append(
        f"{tuning.trials} trials of {tuning.tokens:,} tokens for each of {len(tuning.groups)} groups, by "
        f"{tuning.sampler}: {runs:,} runs, at most {runs * tuning.tokens:,} tokens, "
        "before the runs of the arms"
    )
    if tuning.done:
        return [*texts, *(f"{group.name}: {values_text(group.chosen or {})}" for group in tuning.groups)]
    return [*texts, "not done yet; arms at the values found come on top of those above"]


def _seeds_texts(plan: Plan) -> list[str]:
    """Say which costs the seeds, and more seeds, would find, and when an arm stops early."""
    texts, rule = [], plan.stop
    if rule is not None and rule.diverged is not None:
        texts.append(f"an arm stops after diverged runs: {rule.diverged}")
    if rule is not None and rule.settled is not None:
        from ablate.results.stop_rule import level_of

        looks = rule.settled.looks
        taken = f"looks after each of {looks[0]} to {looks[-1]}, at {level_of(rule):.1%}"
        texts.append(f"an arm stops where it is settled: {taken}")
    elif plan.paired_seeds:
        own, others = len(plan.arms[0].runs), max(1, len(plan.arms) - 1)
        wanted = (own, *[n for n in (2, 3, 5, 8) if n > own][:2])
        found = ((n, cost_found(n, others, moderated=plan.is_moderated)) for n in wanted)
        each = (f"{n} find a cost of {cost:.0%}" for n, cost in found if cost is not None)
        spread = f"where pairs of runs spread by {SPREAD:.1%}, as FP4 arms of docs/findings do"
        texts.append(f"{', '.join(each)} in 4 of 5 comparisons ({spread})")
    return texts


def _batch_text(arm: PlannedArm) -> str:
    batches, devices = arm.batches, arm.resources.devices_per_run
    training = arm.config.training
    text = f"{training.batch_size} sequences × {training.seq_len} tokens = {batches.tokens_per_step:,} a step"
    if batches.micro_batches > 1:
        of = training.batch_size // batches.micro_batches
        text += f", in {batches.micro_batches} micro-batches of {of}"
    return text + f", on {devices} devices" * (devices > 1)


def _model_text(arm: PlannedArm) -> str:
    model = arm.config.model
    if arm.size is None:
        whose = "the command" if isinstance(arm.config.trainer, Command) else arm.config.trainer
        return f"not known: {whose} builds it, and the study has no model"
    text = model.function or f"{model.hf}, {'pretrained' if model.pretrained else 'random'} weights"
    if model.is_built_in:
        text = f"{model.architecture}, width {model.width}, layers {model.layers}, heads {model.heads}"
        text += f", ffn {model.ffn}" + f" of {model.experts} experts" * (model.experts is not None)
    return f"{text}: {parameters_text(arm.size.parameters)} parameters"


def _command_text(plan: Plan, arm: PlannedArm) -> str | None:
    """Write the line that starts an arm's first run; None without a command."""
    command, run = arm.config.trainer, arm.runs[0]
    if not isinstance(command, Command):
        return None
    values = run_values(
        arm.config.with_seed(run.seed),
        run_dir=Path(f"RUNS/{plan.study}/runs/{run.id}"),
        num_devices=max(1, int(arm.resources.num_gpus)),
    )
    return shell_line(command, arm.config.recipe, values)


def _carried_text(arm: PlannedArm) -> str:
    if arm.size is None:
        return "not known"
    carrying = sum(group.count for group in _layer_groups(arm) if group.recipe != _HIGH_PRECISION)
    text = f"{carrying} of {len(arm.layers)} linear layers in low precision"
    if arm.coverage is not None and (hidden := arm.coverage.out_of_reach):
        text += f"; matrices out of reach: {len(hidden)}"
    if idle := idle_roles(arm.config.recipe, layer_places(arm.layers)):
        text += f"; no linear layer has the role {', '.join(idle)}"
    return text


_OF_AN_ARM: dict[str, Callable[[PlannedArm], str]] = {
    "batch": _batch_text,
    "budget": lambda arm: (
        f"{arm.batches.tokens:,} tokens a run in {arm.batches.steps:,} steps"
        + f", {arm.batches.evals:,} evaluations" * (not isinstance(arm.config.trainer, Command))
    ),
    "work": lambda arm: (
        "not known"
        if arm.size is None
        else f"{arm.size.flops_per_token * arm.batches.tokens:.3g} FLOPs a run"
    ),
    "schedule": lambda arm: schedule_text(arm.config.training),
    "model": _model_text,
    "layers": _carried_text,
}


def _each(plan: Plan, text_of: Callable[[PlannedArm], str]) -> list[str]:
    """Write one line if the texts of all arms agree, else one line for each group of arms."""
    groups: dict[str, list[str]] = {}
    for arm in plan.arms:
        groups.setdefault(text_of(arm), []).append(arm.name)
    if len(groups) == 1:
        return list(groups)
    lines = [f"{text} ({names_text(names)})" for text, names in groups.items()]
    return [*lines[:_MAX_GROUPS], *["… (--json lists all)"] * (len(lines) > _MAX_GROUPS)]


def _states(progress: StudyProgress, ids: Iterable[str]) -> str:
    counts = Counter(progress.state(run_id) for run_id in ids)
    return ", ".join(f"{count:,} {state}" for state, count in counts.items())


def _on_hardware(
    plan: Plan, hardware: Iterable[str]
) -> tuple[list[dict[str, Entry | None]], dict[str, Entry]]:
    """Return what each arm, and the whole study, needs on each hardware; without any, each arm on the CPU.

    Errors of all runs are taken to be alike, as on one kind of device. None: the user's own model or trainer.
    """
    shared = shared_tokens(plan)
    runs = [
        len(arm.runs) - sum(shared.get(run.id, 0) for run in arm.runs) / arm.batches.tokens
        for arm in plan.arms
    ]
    arms: list[dict[str, Entry | None]] = [{} for _ in plan.arms]
    study: dict[str, Entry] = {}
    for name in hardware or (CPU,):
        found = [on_hardware(arm.config, arm.resources, name) for arm in plan.arms]
        for own, one in zip(arms, found, strict=True):
            own[name] = None
            if one is not None:
                own[name] = {
                    "memory_bytes": {part: one.memory[part] for part in PURPOSES}
                    | {"total": one.memory.total()},
                    "capacity_bytes": one.capacity_bytes,
                    "fits": one.fits,
                    "figures_are": _EMULATED if one.is_emulated else "modelled",
                    **_hours(one.gpu_hours, "_per_run"),
                }
        hours = [one and one.gpu_hours for one in found]
        total = None
        if None not in hours:
            sums = {
                end: sum(n * getattr(one, end) for n, one in zip(runs, hours, strict=True))
                for end in _ENDS.values()
            }
            total = ModelledFigure(**sums)
        if name != CPU:
            fits = None if None in found else all(one.fits for one in found if one)
            are = _EMULATED if any(one.is_emulated for one in found if one) else "modelled"
            study[name] = {"fits": fits, "figures_are": are, **_hours(total)}
    return arms, study


def _hours(hours: ModelledFigure | None, per: str = "") -> Entry:
    """Return GPU-hours with the ends of their range; None: not modelled."""
    return {f"gpu_hours{per}{suffix}": hours and getattr(hours, end) for suffix, end in _ENDS.items()}


def _hardware_lines(
    plan: Plan, arms: list[dict[str, Entry | None]], study: dict[str, Entry]
) -> Iterator[str]:
    """Yield the lines for people: memory by part, what fits, GPU-hours of arms and of the study."""
    names = [arm.name for arm in plan.arms]
    others = [name for name, own in zip(names, arms, strict=True) if None in own.values()]
    if others:
        yield (
            "memory and GPU-hours are modelled for built-in models and the built-in trainer alone, not for "
            f"{names_text(others)}"
        )
    if len(others) == len(names):
        return
    yield "\nmodelled, with 95 % ranges (–: no unit for a format, or not modelled)"
    for name, whole in study.items():
        known = [entry for own in arms if (entry := own[name]) is not None]
        most = max(known, key=lambda entry: entry["memory_bytes"]["total"])
        parts = ", ".join(f"{part} {size / 1e9:.3g}" for part, size in most["memory_bytes"].items() if size)
        fitting = sum(bool(entry["fits"]) for entry in known)
        yield f"{name:<9} {most['capacity_bytes'] / 1e9:.3g} GB; at its peak the largest arm takes {parts}"
        yield f"          arms that fit into {FITS_SHARE:.0%} of it: {fitting} of {len(known)}"
        yield f"          all runs: {_range(whole, 'gpu_hours')} GPU-hours"
        if without_unit := sum(
            entry["figures_are"] == _EMULATED or entry["gpu_hours_per_run"] is None for entry in known
        ):
            yield (
                f"          no unit for a format of {without_unit} of {len(known)} arms: emulated with exact "
                "values; their time there is no measure of the format's speed"
            )
    yield "\nGPU-hours a run, modelled:"
    rows = [
        (name, *(_range(entry, "gpu_hours_per_run") for entry in own.values()))
        for name, own in zip(names, arms, strict=True)
    ]
    yield format_table(("arm", *study), rows)
    if any(whole["figures_are"] == _EMULATED for whole in study.values()):
        yield f"\n~ emulated: {_EMULATED}, which the ranges leave out"


def _range(entry: Entry | None, key: str) -> str:
    ends: list[Any] = [entry and entry[key + suffix] for suffix in _ENDS]
    if entry is None or None in ends:
        return "–"
    about = "~" if entry["figures_are"] == _EMULATED else ""
    return about + "{} [{}, {}]".format(*map(_two_digits, ends))


def _two_digits(hours: float) -> str:
    """Write two significant digits, or all before the point: 2.1e-05, 1.7, 1,286."""
    return f"{hours:.2g}" if hours < 9.5 else f"{hours:,.0f}"
