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
from collections import defaultdict
from dataclasses import asdict, fields, is_dataclass, replace
from functools import cache
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from ablate.base.errors import Problem, UserError
from ablate.plan.layers import OwnCode, check_diagnosed
from ablate.plan.plan import Plan, PlannedArm, planned_runs
from ablate.plan.shares import decided, this_machine
from ablate.plan.tuning import with_search
from ablate.recipes import describe
from ablate.recipes.coverage import coverage_of
from ablate.run.architecture import (
    LinearLayer,
    ModelSize,
    layer_places,
    linear_layers,
    model_size,
)
from ablate.run.command import REACHES, THE_COMMANDS, Command
from ablate.run.config import ArmConfig, Fork, configured
from ablate.run.loss_units import UNIT_NAMES, stored_unit
from ablate.run.schedule import plan_steps
from ablate.study.study import again_name, shared_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

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
    code: dict[str, None] = {}
    for arm in study.arms:
        if arm.model.function:
            code[arm.model.function] = None
        if isinstance(arm.trainer, Command):
            code[shlex.join(arm.trainer.words)] = None
        elif arm.trainer:
            code[arm.trainer] = None
    if code and is_new:
        yield f"Study {study.name} runs code of its own on this machine: {', '.join(code)}. Trust it first."
    for key, most in _HIGHEST.items():
        values = {arm.name: getattr(arm.training, key) for arm in study.arms}
        high = {name: value for name, value in values.items() if value > most}
        if high:
            if len(high) == len(values):
                arms = "every arm"
            else:
                arms = f"arm '{next(iter(high))}'"
            yield f"{key} is {max(high.values()):g} in {arms}: is that meant? (AdamW's is below {most:g})"


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
        raise UserError(
            study.source.problem(("search",), "a search, not a study", hint)
        )
    identities, missing = _identify_all(study, identify, without_data=without_data)
    planner = _ArmPlanner(study, identities, machines)
    arms = {arm.name: planner.plan(arm) for arm in study.arms}
    problems = [*planner.undeclared_code(), *_incomparable_arms(study, arms)]
    problems = problems or [*_equal_arms(study, arms)]
    if problems:
        raise UserError(*problems)
    _check_target(study, min(identity.vocab_size for identity in identities.values()))
    check_diagnosed(study, arms)
    if study.baseline_again:
        again = _again(study, arms[study.baseline])
        arms[again.name] = again
    content = shared_fields(Plan, study) | {
        "study": study.name,
        "training": _training_of(study),
        "arms": tuple(arms.values()),
    }
    plan = Plan(**content, missing=missing, loss_unit=_loss_unit(study))
    if study.tune is None:
        return plan
    return with_search(plan, study.tune)


class _ArmPlanner:
    """Plans the arms of a study. Arms with the same section share what is computed from it."""

    def __init__(
        self,
        study: Study,
        identities: Mapping[DataConfig | None, DataIdentity],
        machines: Machines,
    ) -> None:
        self._identities = identities
        self._machines = machines
        self._study = study
        self._arms = {arm.name: arm for arm in study.arms}
        self._baseline = self._arms[study.baseline]
        self._baseline_sections = _sections_of(self._baseline)
        self._own_code = OwnCode(study)
        self._folded: dict[str, list[str]] = defaultdict(list)
        for cell, name in study.folded.items():
            self._folded[name].append(cell)
        self._describe = cache(describe)
        self._plan_steps = cache(plan_steps)
        self._model_size = cache(model_size)
        self._linear_layers = cache(linear_layers)
        self._settings_of = cache(_settings_of)

    def plan(self, arm: ResolvedArm) -> PlannedArm:
        """Plan one arm."""
        identity = self._identities[_data_of(arm)]
        code_digest, outline = self._own_code.read(arm, identity.vocab_size)
        size: ModelSize | None = None
        layers: tuple[LinearLayer, ...] = ()
        coverage = None
        if outline is not None:
            size = outline.size
            layers = outline.layers
            coverage = coverage_of(arm.recipe, outline.matrices, layer_places(layers))
        elif arm.model.describes(arm.trainer):
            size = self._model_size(
                arm.model, vocab_size=identity.vocab_size, seq_len=arm.training.seq_len
            )
            layers = self._linear_layers(arm.model, identity.vocab_size)
        config = self._configure(arm, identity, code_digest)
        batches = self._plan_steps(arm.training, arm.resources.devices_per_run)
        return PlannedArm(
            name=arm.name,
            description=arm.description,
            recipe=self._recipe_text(arm),
            tokens=batches.tokens,
            factors=arm.factors,
            differs=self._differences(arm),
            folded=tuple(self._folded[arm.name]),
            fork=arm.fork,
            runs=planned_runs(config, self._study.seeds),
            config=config,
            resources=decided(config, arm.resources, self._machines),
            batches=batches,
            size=size,
            layers=layers,
            coverage=coverage,
        )

    def undeclared_code(self) -> Iterator[Problem]:
        """Yield the arms whose code is not the baseline's, and that do not say so by ``code``."""
        for arm in self._arms.values():
            if arm.code != self._baseline.code or "code" in self._study.waive:
                continue
            if names := self._own_code.changed_code(arm):
                yield self._study.source.problem(
                    self._study.where(arm, "code"),
                    f"arm '{arm.name}' runs other code than the baseline: {shorten(', '.join(names), 200)}",
                    "its runs would not be compared: give all arms the same; or write code: DIR in the arm, in "
                    "place of trainer.cwd, if this is what it tests; or waive: [code]",
                )

    def _configure(
        self, arm: ResolvedArm, identity: DataIdentity, code_digest: str | None
    ) -> ArmConfig:
        fork = None
        if arm.fork is not None:
            parent = self._arms[arm.fork.arm]
            fork = Fork(
                tokens=arm.fork.tokens, recipe=parent.recipe, training=parent.training
            )
        return ArmConfig(
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
            replayed=self._baseline.recipe if arm.model.routing == "replay" else None,
        )

    def _recipe_text(self, arm: ResolvedArm) -> str:
        if isinstance(arm.trainer, Command) and not arm.trainer.reads_recipe:
            return arm.trainer.precision or "as the command has it"
        return self._describe(arm.recipe)

    def _differences(self, arm: ResolvedArm) -> dict[str, tuple[Any, Any]]:
        """Map each setting that differs from the baseline's to the baseline's value and the arm's."""
        differences: dict[str, tuple[Any, Any]] = {}
        for section, arm_section in _sections_of(arm).items():
            baseline_section = self._baseline_sections[section]
            if arm_section == baseline_section:
                continue
            if section == "recipe" and arm.recipe == self._baseline.recipe:
                continue  # only written in another way
            arm_settings = self._settings_of(section, arm_section)
            settings = self._settings_of(section, baseline_section)
            for key, baseline_value in settings.items():
                arm_value = arm_settings.get(key)
                is_code = key == "trainer.cwd" and arm.code != self._baseline.code
                if arm_value != baseline_value and not is_code:
                    differences[key] = (baseline_value, arm_value)
        return differences


def _data_of(arm: ResolvedArm) -> DataConfig | None:
    """Return what an arm reads; None: what its command says."""
    return None if isinstance(arm.trainer, Command) else arm.data


def _training_of(study: Study) -> dict[str, Any]:
    """Return the base's fields of training that mean something for an arm."""
    training = asdict(study.training)
    if all(isinstance(arm.trainer, Command) for arm in study.arms):
        return {key: training[key] for key in REACHES}
    return training


def _again(study: Study, baseline: PlannedArm) -> PlannedArm:
    """Return the second arm of the baseline, with as many unused seeds."""
    first = max(study.seeds) + 1
    return replace(
        baseline,
        name=again_name(baseline.name),
        description=f"{baseline.name} with other seeds, in which nothing should be found (A/A)",
        again=True,
        factors={},
        folded=(),
        runs=planned_runs(baseline.config, range(first, first + len(study.seeds))),
    )


def _check_target(study: Study, vocab_size: int) -> None:
    """Refuse a target that a model reaches by guessing; ``vocab_size``: the smallest of the arms'."""
    guess = math.log(vocab_size)
    target = study.target
    if target is None or target.val_loss < guess:
        return
    message = (
        f"an untrained model reaches {target.value:g}: a guess among {vocab_size} tokens has a loss of "
        f"{guess:.3f}, a perplexity of {vocab_size}"
    )
    place = ("target", target.kind)
    raise UserError(study.source.problem(place, message, "take a target below that"))


def _loss_unit(study: Study) -> LossUnit:
    """Return the unit of all arms' losses; raise ``UserError`` if it differs between arms."""
    units: dict[LossUnit, str] = {}
    for arm in study.arms:
        unit: LossUnit = "nats"
        if isinstance(arm.trainer, Command) and arm.trainer.metrics is not None:
            unit = stored_unit(arm.trainer.metrics.loss_unit)
        units.setdefault(unit, arm.name)
    if len(units) > 1:
        names = [f"{UNIT_NAMES[unit]} (arm '{name}')" for unit, name in units.items()]
        raise UserError(
            f"the losses are in {' and in '.join(names)}",
            hint="trainer.metrics.unit names it",
        )
    return next(iter(units))


def _identify_all(
    study: Study,
    identify: Callable[[DataConfig], DataIdentity] | None,
    *,
    without_data: bool,
) -> tuple[dict[DataConfig | None, DataIdentity], tuple[Problem, ...]]:
    """Return the identity of each data section, and the faults found; None: of the data that a command reads.

    Data that cannot be used get an identity without a digest, if the size of their vocabulary is known.
    """
    from ablate.data import identity

    identify = identify or identity.identify
    identities: dict[DataConfig | None, DataIdentity] = {}
    problems: dict[Problem, None] = {}
    for data in dict.fromkeys(map(_data_of, study.arms)):
        digest = ""
        if data is None:
            digest = THE_COMMANDS
            vocab_size = 10**15
        else:
            try:
                identities[data] = identify(data)
                continue
            except UserError as error:
                problems |= dict.fromkeys(error.problems)
            vocab_size = data.vocab_size or 0
            if not vocab_size and data.tokenizer == "bytes":
                vocab_size = identity.BYTES_VOCABULARY
            without_data = without_data and vocab_size > 0
        identities[data] = identity.DataIdentity(
            digest=digest, vocab_size=vocab_size, num_bytes=0
        )
    if problems and not without_data:
        raise UserError(*problems)
    return identities, tuple(problems)


def _equal_arms(study: Study, arms: dict[str, PlannedArm]) -> Iterator[Problem]:
    """Yield the arms that are the same run as an earlier one."""
    first: dict[str, str] = {}
    for name, arm in arms.items():
        same = first.setdefault(arm.runs[0].id, name)
        if same != name and arm.config.data_digest:
            yield Problem(
                file=study.source.file,
                what=f"arm '{name}' is the same as arm '{same}'",
                hint="their data and files have the same content; other sources count by code: DIR",
            )


def _incomparable_arms(study: Study, arms: dict[str, PlannedArm]) -> Iterator[Problem]:
    """Yield the settings for which the report would not compare an arm's runs with the baseline's."""
    baseline_settings = _compared_settings(arms[study.baseline])
    for arm in study.arms:
        for setting, value in _compared_settings(arms[arm.name]).items():
            expected = baseline_settings[setting]
            if setting in study.waive or not value or not expected or value == expected:
                continue
            message = f"arm '{arm.name}' differs from the baseline in {setting}: expected {expected}, got {value}"
            hint = f"its runs would not be compared: give all arms the same, or write waive: [{setting}]"
            yield study.source.problem(study.where(arm, setting), message, hint)


def _compared_settings(arm: PlannedArm) -> dict[Setting, str | None]:
    config = arm.config
    plain = vars(config) | {
        "data": vars(config.data),
        "training": vars(config.training),
    }
    return {
        **configured(plain),
        "data": config.data_digest[:12],
        "device": "GPU" if arm.resources.num_gpus else "CPU",
        "world_size": str(arm.resources.devices_per_run),
    }


def _sections_of(arm: ResolvedArm) -> dict[str, Any]:
    """Return what two arms can differ in."""
    fork = None
    if arm.fork is not None:
        fork = f"from {arm.fork.arm} after {arm.fork.tokens:,} tokens"
    return {
        "model": arm.model,
        "data": arm.data,
        "training": arm.training,
        "recipe": arm.recipe_spec,
        "backend": arm.backend,
        "trainer": arm.trainer_spec,
        "code": arm.code,
        "fork": fork,
    }


def _settings_of(name: str, section: Any) -> dict[str, Any]:
    """Map dotted paths to a section's values as plain data, nested parts without their defaults."""
    if not is_dataclass(section):
        return {name: section}
    settings = {}
    for field in fields(section):
        value = getattr(section, field.name)
        settings[f"{name}.{field.name}"] = _PLAIN.dump_python(
            value, exclude_defaults=True
        )
    return settings
