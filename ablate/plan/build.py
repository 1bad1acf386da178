"""Study → plan: every arm with every seed, with ids. Pure: the same study and data give the same ids.

Planning learns three things from outside: the identity of the data (``identify``, called once for each
distinct data section), the code of the user's own models and trainers (``OwnCode``), and the machines' GPUs,
where ``resources.gpus`` is ``auto``. It uses no clock, no random numbers, and no torch for built-in models
where there is no GPU.

How it fails: ``UserError`` for missing data files (all data sections at once), for code that cannot be used,
for two arms that are one arm because their data differ only in name, and for an arm whose runs the report
would not compare with the baseline's. With ``without_data`` a study without its data still gets a plan:
``missing`` says what is wrong, and no run has an id.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict, fields, is_dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from ablate.base.errors import Problem, UserError
from ablate.plan.layers import OwnCode, check_diagnosed
from ablate.plan.plan import Plan, PlannedArm, planned_runs
from ablate.plan.shares import decided, this_machine
from ablate.plan.tuning import tuned_plan
from ablate.recipes import describe
from ablate.recipes.coverage import coverage_of
from ablate.run.architecture import LinearLayer, ModelSize, layer_places, linear_layers, model_size
from ablate.run.command import REACHES, THE_COMMANDS, Command
from ablate.run.config import ArmConfig, Fork, configured
from ablate.run.loss_units import UNIT_NAMES, stored_unit
from ablate.run.schedule import plan_steps
from ablate.store.plan_file import Question
from ablate.study.study import again_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ablate.data import DataIdentity
    from ablate.plan.shares import Machines
    from ablate.run.config import DataConfig, Setting
    from ablate.run.loss_units import LossUnit
    from ablate.study import ResolvedArm, Study

_PLAIN: TypeAdapter[Any] = TypeAdapter(Any)
_HIGHEST = {"learning_rate": 0.5, "weight_decay": 2.0, "adam_eps": 1e-2}
"""Values of training above these are asked back."""


def warnings_of(study: Study, *, is_new: bool) -> Iterator[str]:
    """Yield values that are hardly meant and, if the study is new here, the user's code that it executes."""
    codes = [one for arm in study.arms for one in (arm.model.function, arm.trainer) if one]
    names = dict.fromkeys(shlex.join(one.words) if isinstance(one, Command) else one for one in codes)
    if names and is_new:
        yield f"Study {study.name} runs code of its own on this machine: {', '.join(names)}. Trust it first."
    for key, most in _HIGHEST.items():
        if odd := {arm.name: own for arm in study.arms if (own := getattr(arm.training, key)) > most}:
            where = "every arm" if len(odd) == len(study.arms) else f"arm '{next(iter(odd))}'"
            yield f"{key} is {max(odd.values()):g} in {where}: is that meant? (AdamW's is below {most:g})"


def build_plan(
    study: Study,
    identify: Callable[[DataConfig], DataIdentity] | None = None,
    *,
    without_data: bool = False,
    machines: Machines = this_machine,
) -> Plan:
    """Plan a study. ``identify`` returns the identity of a data section; default: ``ablate.data.identify``.

    ``without_data``: if data cannot be used but the study states the size of their vocabulary, plan without
    ids instead of raising. ``machines``: looks up where the runs go, for ``resources.gpus: auto`` alone.

    Raises:
        UserError: data that cannot be used, two arms that are the same run, or a file that is a search.
    """
    if study.search is not None:
        hint = "start it with: ablate search"
        raise UserError(study.problem(("search",), "a search, not a study", hint))
    identities, missing = _identify_all(study, identify, without_data=without_data)
    # Arms with the same section share its results.
    described, counted = cache(describe), cache(plan_steps)
    sized, laid_out, stated = cache(model_size), cache(linear_layers), cache(_stated)
    own_code = OwnCode(study)
    named = {arm.name: arm for arm in study.arms}
    base = named[study.baseline]
    base_parts = _parts(base)
    folded: dict[str, list[str]] = {}
    for name, into in study.folded.items():
        folded.setdefault(into, []).append(name)
    arms: dict[str, PlannedArm] = {}
    for arm in study.arms:
        identity = identities[None if isinstance(arm.trainer, Command) else arm.data]
        code_digest, outline = own_code.read(arm, identity.vocab_size)
        size: ModelSize | None = None
        layers: tuple[LinearLayer, ...] = ()
        if outline is not None:
            size, layers = outline.size, outline.layers
        elif arm.model.describes(arm.trainer):
            size = sized(arm.model, vocab_size=identity.vocab_size, seq_len=arm.training.seq_len)
            layers = laid_out(arm.model, identity.vocab_size)
        fork = None
        if arm.fork is not None:
            parent = named[arm.fork.arm]
            fork = Fork(tokens=arm.fork.tokens, recipe=parent.recipe, training=parent.training)
        config = ArmConfig(
            model=arm.model,
            data=arm.data,
            data_digest=identity.digest,
            vocab_size=identity.vocab_size,
            training=arm.training,
            recipe=arm.recipe,
            backend=arm.backend,
            trainer=arm.trainer,
            code_digest=code_digest,
            fork=fork,
            replayed=base.recipe if arm.model.routing == "replay" else None,
        )
        batches = counted(arm.training, arm.resources.devices_per_run)
        differs: dict[str, tuple[Any, Any]] = {}
        for part, own in _parts(arm).items():
            usual = base_parts[part]
            if own != usual and (part != "recipe" or arm.recipe != base.recipe):
                said = stated(part, own)
                told = stated(part, usual).items()
                differs |= {key: (value, said.get(key)) for key, value in told if value != said.get(key)}
        recipe = described(arm.recipe)
        if isinstance(arm.trainer, Command) and not arm.trainer.reads_recipe:
            recipe = arm.trainer.precision or "as the command has it"
        arms[arm.name] = PlannedArm(
            name=arm.name,
            description=arm.description,
            recipe=recipe,
            tokens=batches.tokens,
            factors=arm.factors,
            differs=differs,
            folded=tuple(folded.get(arm.name, ())),
            fork=arm.fork,
            runs=planned_runs(config, study.seeds),
            config=config,
            resources=decided(config, arm.resources, machines),
            batches=batches,
            size=size,
            layers=layers,
            coverage=None
            if outline is None
            else coverage_of(arm.recipe, outline.matrices, layer_places(layers)),
        )
    if problems := list(_not_comparable(study, arms)):
        raise UserError(*problems)
    fewest = min(identity.vocab_size for identity in identities.values())
    target, guess = study.target, math.log(fewest)
    if target is not None and target.val_loss >= guess:
        what = (
            f"an untrained model reaches {target.value:g}: a guess among {fewest} tokens has a loss of "
            f"{guess:.3f}, a perplexity of {fewest}"
        )
        raise UserError(study.problem(("target", target.kind), what, "take a target below that"))
    check_diagnosed(study, arms)
    if study.baseline_again:  # with as many unused seeds
        first, again = max(study.seeds) + 1, again_name(base.name)
        arms[again] = replace(
            arms[base.name],
            name=again,
            description=f"{base.name} with other seeds, in which nothing should be found (A/A)",
            again=True,
            factors={},
            folded=(),
            runs=planned_runs(arms[base.name].config, range(first, first + len(study.seeds))),
        )
    training = asdict(study.training)
    if all(isinstance(arm.trainer, Command) for arm in study.arms):
        training = {key: training[key] for key in REACHES}
    plan = Plan(
        **{field.name: getattr(study, field.name) for field in fields(Question)},
        study=study.name,
        training=training,
        arms=tuple(arms.values()),
        folded=study.folded,
        diagnostics=study.diagnostics,
        missing=missing,
        keep_weights=study.keep_weights,
        loss_unit=_loss_unit(study),
    )
    return plan if study.tune is None else tuned_plan(plan, study.tune)


def _loss_unit(study: Study) -> LossUnit:
    """Return the unit of all arms' losses; raise ``UserError`` if it differs between arms."""
    units: dict[LossUnit, str] = {}
    for arm in study.arms:
        metrics = arm.trainer.metrics if isinstance(arm.trainer, Command) else None
        unit = "nats" if metrics is None else stored_unit(metrics.loss_unit)
        units.setdefault(unit, arm.name)
    if len(units) > 1:
        parts = (f"{UNIT_NAMES[unit]} (arm '{name}')" for unit, name in units.items())
        raise UserError(f"the losses are in {' and in '.join(parts)}", hint="trainer.metrics.unit names it")
    return next(iter(units))


def _identify_all(
    study: Study, identify: Callable[[DataConfig], DataIdentity] | None, *, without_data: bool
) -> tuple[dict[DataConfig | None, DataIdentity], tuple[Problem, ...]]:
    """Return the identity of each data section, and the faults found; None: of the data that a command reads.

    Data that cannot be used get an identity without a digest, if the size of their vocabulary is known.
    """
    from ablate.data import identity

    identities: dict[DataConfig | None, DataIdentity] = {}
    problems: dict[Problem, None] = {}
    for data in dict.fromkeys(None if isinstance(arm.trainer, Command) else arm.data for arm in study.arms):
        if data is None:
            identities[data] = identity.DataIdentity(digest=THE_COMMANDS, vocab_size=10**15, num_bytes=0)
            continue
        try:
            identities[data] = (identify or identity.identify)(data)
        except UserError as error:
            problems |= dict.fromkeys(error.problems)
            size = data.vocab_size or (identity.BYTES_VOCABULARY if data.tokenizer == "bytes" else None)
            without_data = without_data and size is not None
            identities[data] = identity.DataIdentity(digest="", vocab_size=size or 0, num_bytes=0)
    if problems and not without_data:
        raise UserError(*problems)
    return identities, tuple(problems)


def _not_comparable(study: Study, arms: dict[str, PlannedArm]) -> Iterator[Problem]:
    """Yield arms that are the same run, and settings for which the report would not compare an arm's runs."""
    first: dict[str, str] = {}
    shared: dict[str, dict[Setting, str | None]] = {}
    for name, arm in arms.items():
        same, config = first.setdefault(arm.runs[0].id, name), arm.config
        if same != name and config.data_digest:
            what = f"arm '{name}' is the same as arm '{same}'"
            yield Problem(file=study.shown_path, what=what, hint="their data have the same content")
        shared[name] = {
            **configured(vars(config) | {"data": vars(config.data), "training": vars(config.training)}),
            "data": config.data_digest[:12],
            "device": "GPU" if arm.resources.num_gpus else "CPU",
            "world_size": str(arm.resources.devices_per_run),
        }
    for one in study.arms:
        for setting, own in shared[one.name].items():
            usual = shared[study.baseline][setting]
            if setting not in study.waive and own and usual and own != usual:
                what = f"arm '{one.name}' differs from the baseline in {setting}: expected {usual}, got {own}"
                hint = f"its runs would not be compared: give all arms the same, or write waive: [{setting}]"
                yield study.problem(study.where(one, setting), what, hint)


def _parts(arm: ResolvedArm) -> dict[str, Any]:
    """Return what two arms can differ in."""
    fork = None if arm.fork is None else f"from {arm.fork.arm} after {arm.fork.tokens:,} tokens"
    sections = {"model": arm.model, "data": arm.data, "training": arm.training, "recipe": arm.recipe_spec}
    return sections | {"backend": arm.backend, "trainer": arm.trainer, "fork": fork}


def _stated(part: str, section: Any) -> dict[str, Any]:
    """Map dotted paths to a section's values as plain data, nested parts without their defaults."""
    if not is_dataclass(section):
        return {part: section}
    return {
        f"{part}.{one.name}": _PLAIN.dump_python(getattr(section, one.name), exclude_defaults=True)
        for one in fields(section)
    }
