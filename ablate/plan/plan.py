"""Study → plan: every arm with every seed, with ids. Pure: the same study and data give the same plan.

Planning learns two things from outside: the identity of the data (``identify``, called once for each distinct
data section), and the code of models and trainers of the user's own (``foreign``). It uses no clock, no
random numbers, and no torch for built-in models.

How it fails: ``UserError`` for missing data files (all data sections at once), for code that cannot be used,
for two arms whose data differ only in name, which are one arm, and for an arm whose runs the report would set
apart from the baseline's. With ``without_data`` a study without its data still gets a plan: ``missing`` says
what is wrong, and no run has an id.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from ablate.base.errors import Problem, UserError
from ablate.models.arithmetic import ModelSize, model_size, outlined_size
from ablate.plan.custom_models import Foreigners
from ablate.plan.diagnosed import check_diagnosed
from ablate.recipes import describe
from ablate.run.architecture import LinearLayer, linear_layers
from ablate.run.config import (
    ArmConfig,
    DataConfig,
    Fork,
    ResourcesConfig,
    Setting,
    TrainingConfig,
    configured,
)
from ablate.run.ids import run_ids
from ablate.run.schedule import StepPlan, plan_steps
from ablate.store.plan_file import LockedRun
from ablate.study.study import again_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ablate.data import DataIdentity
    from ablate.recipes.coverage import Coverage
    from ablate.run.config import ModelConfig, RunConfig
    from ablate.run.diagnostics import Diagnostics
    from ablate.store.plan_file import DroppedCell, StopRule, Target
    from ablate.study import FoldedCell, ResolvedArm, Study
    from ablate.study.search_space import Tune
    from ablate.study.study import ForkPoint


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedArm:
    """One arm: its configuration and its runs, with derived figures.

    The id of a run hashes the data too, and is empty if they are missing.
    ``differs`` maps a field to the baseline's value and this arm's. ``folded``: cells of the grid with the
    same configuration. ``again``: the arm repeats the baseline with other seeds. ``tuned_from``: the arm that
    this one repeats with its tuned values. ``size``, ``layers``: None and none where a trainer of the user's
    own builds a model that the study does not describe. ``coverage``: what its recipe reaches in a model that
    is not built in, else None.
    """

    name: str
    description: str | None
    again: bool
    recipe_text: str
    factors: dict[str, Any]
    differs: dict[str, tuple[Any, Any]]
    folded: tuple[str, ...]
    runs: tuple[LockedRun, ...]
    config: ArmConfig
    resources: ResourcesConfig
    batches: StepPlan
    size: ModelSize | None
    layers: tuple[LinearLayer, ...]
    coverage: Coverage | None
    fork: ForkPoint | None = None
    tuned_from: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything that a study will run. ``missing``: faults of its data, without which no run has an id.

    ``tuning``: the search before the seeds; arms with the tuned values are added once it is done.
    ``too_short``: evaluations that are larger than the validation text seems to be.
    ``settings``: what ``--set`` has changed of the study's file. ``keep_weights``: each run leaves its own.
    """

    study: str
    description: str | None
    baseline: str
    target: Target | None
    paired_seeds: bool
    intervals: Literal["moderated", "own"]
    waive: tuple[Setting, ...]
    stop: StopRule | None
    training: TrainingConfig
    arms: tuple[PlannedArm, ...]
    folded: tuple[FoldedCell, ...]
    dropped: tuple[DroppedCell, ...]
    diagnostics: Diagnostics | None = None
    missing: tuple[Problem, ...] = ()
    tuning: Tune | None = None
    too_short: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    keep_weights: bool = False

    def arm(self, name: str) -> PlannedArm:
        """Return an arm by name; raises ``KeyError``."""
        return {arm.name: arm for arm in self.arms}[name]

    def runs(self) -> Iterator[tuple[PlannedArm, LockedRun]]:
        """Yield every run with its arm."""
        return ((arm, run) for arm in self.arms for run in arm.runs)


def code_warning(study: Study) -> str | None:
    """Return a sentence that names the code which planning or running a study executes, or None."""
    names = {name: None for arm in study.arms for name in (arm.model.function, arm.trainer) if name}
    if not names:
        return None
    return f"Study {study.name} runs code of its own on this machine: {', '.join(names)}. Trust it first."


def build_plan(
    study: Study,
    identify: Callable[[DataConfig], DataIdentity] | None = None,
    *,
    without_data: bool = False,
) -> Plan:
    """Plan a study. ``identify`` returns the identity of a data section; default: ``ablate.data.identify``.

    ``without_data``: if data cannot be used but the study states the size of their vocabulary, plan without
    ids instead of raising.

    Raises:
        UserError: data that cannot be used, two arms that are the same run, or a file that is a search.
    """
    if study.search is not None:
        from ablate.study.load import shipped_studies

        line, column = study.search.lines["search"]
        name = study.path.stem if study.path in shipped_studies().values() else study.path.name
        what, hint = "a search, not a study", f"start it with: ablate search {name}"
        raise UserError(Problem(file=study.shown_path, line=line, column=column, what=what, hint=hint))
    if identify is None:
        from ablate.data import identify as identify_data

        identify = identify_data
    identities, missing = _identify_all(study, identify, without_data=without_data)
    baseline = next(arm for arm in study.arms if arm.name == study.baseline)
    # The results of one section are shared by all arms with it.
    described, counted, sized, plain = cache(describe), cache(plan_steps), cache(_built_in), cache(_fields)
    foreigners = Foreigners(study)
    folded: defaultdict[str, list[str]] = defaultdict(list)
    for cell in study.folded:
        folded[cell.into].append(cell.name)
    arms = []
    for arm in study.arms:
        identity = identities[arm.data]
        foreigners.digest(arm)  # finds code that is not there
        outline = foreigners.outline(arm, identity.vocab_size)
        size: ModelSize | None = None
        layers: tuple[LinearLayer, ...] = ()
        if arm.model.describes(arm.trainer):
            size, layers = sized(arm.model, identity.vocab_size, arm.training.seq_len)
        elif outline is not None:
            size, layers = outlined_size(outline), outline.layers
        config = ArmConfig(
            model=arm.model,
            data=arm.data,
            data_digest=identity.digest,
            vocab_size=identity.vocab_size,
            training=arm.training,
            recipe=arm.recipe,
            backend=arm.backend,
            trainer=arm.trainer,
            code_digest=foreigners.digest(arm),
            fork=_fork(study, arm),
        )
        arms.append(
            PlannedArm(
                name=arm.name,
                description=arm.description,
                again=False,
                recipe_text=described(arm.recipe),
                factors=arm.factors,
                differs=_differences(baseline, arm, plain),
                folded=tuple(folded[arm.name]),
                runs=planned_runs(config, study.seeds),
                config=config,
                resources=arm.resources,
                batches=counted(arm.training, arm.resources.devices_per_run),
                size=size,
                layers=layers,
                coverage=None if outline is None else outline.coverage(arm.recipe),
                fork=arm.fork,
            )
        )
    _refuse_shared_ids(study, arms)
    _refuse_set_apart(study, arms)
    _refuse_a_guess(study, min(identity.vocab_size for identity in identities.values()))
    check_diagnosed(study, {arm.name: arm.layers for arm in arms})
    if study.baseline_again:
        arms.append(_again(study, next(arm for arm in arms if arm.name == study.baseline)))
    return Plan(
        study=study.name,
        description=study.description,
        baseline=study.baseline,
        target=study.target,
        paired_seeds=study.paired_seeds,
        intervals=study.intervals,
        waive=study.waive,
        stop=study.stop,
        training=study.training,
        arms=tuple(arms),
        folded=study.folded,
        dropped=study.dropped,
        diagnostics=study.diagnostics,
        missing=missing,
        tuning=study.tune,
        too_short=tuple(dict.fromkeys(_too_short(study, identities))),
        settings=study.settings,
        keep_weights=study.keep_weights,
    )


def _too_short(study: Study, identities: Mapping[DataConfig, DataIdentity]) -> Iterator[str]:
    """Yield what the sizes of the data tell of evaluations that ``ablate run`` would refuse."""
    for arm in study.arms:
        about, training = identities[arm.data].validation_tokens, arm.training
        needed = -(-training.eval_tokens // training.seq_len) * training.seq_len
        if about is None or about[1] > needed:
            continue
        least, most = about
        fits = (least - 1) // training.seq_len * training.seq_len
        more = "add text or data.validation_paths, or lower training.seq_len"
        remedy = f"training.eval_tokens: {fits} fits" if fits > 0 else more
        yield (
            f"about {most:,} validation tokens at most, but training.eval_tokens asks for {needed:,}, which "
            f"`ablate run` would refuse ({remedy})"
        )


def _fork(study: Study, arm: ResolvedArm) -> Fork | None:
    if arm.fork is None:
        return None
    parent = next(one for one in study.arms if one.name == arm.fork.parent)
    return Fork(tokens=arm.fork.at, recipe=parent.recipe, training=parent.training)


def _built_in(model: ModelConfig, vocab_size: int, seq_len: int) -> tuple[ModelSize, tuple[LinearLayer, ...]]:
    size = model_size(model, vocab_size=vocab_size, seq_len=seq_len)
    return size, linear_layers(model, vocab_size)


def configured_runs(plan: Plan) -> list[tuple[str, RunConfig, ResourcesConfig]]:
    """Return the id, configuration and resources of each run, seed by seed; first what others fork from.

    Empty where no run of the plan can have its first steps in common with another.
    """
    changes = any(arm.config.fork is not None or arm.config.recipe.later for arm in plan.arms)
    if plan.missing or plan.diagnostics is not None or not changes:
        return []
    pairs = sorted(plan.runs(), key=lambda pair: (pair[1].seed, pair[0].config.fork is not None))
    return [(run.id, arm.config.with_seed(run.seed), arm.resources) for arm, run in pairs]


def planned_runs(config: ArmConfig, seeds: Sequence[int]) -> tuple[LockedRun, ...]:
    """Return the runs of an arm; their ids are empty if the data are missing."""
    texts = run_ids(config, seeds) if config.data_digest else [""] * len(seeds)
    return tuple(LockedRun(id=text, seed=seed) for text, seed in zip(texts, seeds, strict=True))


def _again(study: Study, baseline: PlannedArm) -> PlannedArm:
    """Return an arm that repeats the baseline with as many unused seeds."""
    first = max(study.seeds) + 1
    seeds = range(first, first + len(study.seeds))
    return replace(
        baseline,
        name=again_name(baseline.name),
        description=f"{baseline.name} with other seeds, in which nothing should be found (A/A)",
        again=True,
        factors={},
        folded=(),
        runs=planned_runs(baseline.config, seeds),
    )


def _identify_all(
    study: Study, identify: Callable[[DataConfig], DataIdentity], *, without_data: bool
) -> tuple[dict[DataConfig, DataIdentity], tuple[Problem, ...]]:
    """Return the identity of each data section, and the faults found."""
    identities: dict[DataConfig, DataIdentity] = {}
    problems: dict[Problem, None] = {}
    for data in dict.fromkeys(arm.data for arm in study.arms):
        try:
            identities[data] = identify(data)
        except UserError as error:
            problems |= dict.fromkeys(error.problems)
            absent = _absent(data)
            if absent is None:
                without_data = False
            else:
                identities[data] = absent
    if problems and not without_data:
        raise UserError(*problems)
    return identities, tuple(problems)


def _absent(data: DataConfig) -> DataIdentity | None:
    """Return a placeholder for missing data, None unless the study states the size of their vocabulary."""
    from ablate.data.identity import BYTES_VOCABULARY, DataIdentity

    vocab_size = data.vocab_size
    if vocab_size is None and data.tokenizer == "bytes" and data.source != "tokens":
        vocab_size = BYTES_VOCABULARY
    return None if vocab_size is None else DataIdentity(digest="", vocab_size=vocab_size, num_bytes=0)


def _refuse_a_guess(study: Study, vocab_size: int) -> None:
    """Raise ``UserError`` for a target that a model reaches before it has learnt anything."""
    target = study.target
    if target is None or target.val_loss < math.log(vocab_size):
        return
    is_perplexity = target.kind == "perplexity"
    guess = f"a perplexity of {vocab_size}" if is_perplexity else f"a loss of {math.log(vocab_size):.3f}"
    what = f"an untrained model reaches {target.value:g}: a guess among {vocab_size} tokens has {guess}"
    line, column = study.target_line
    hint = "take a target below that"
    raise UserError(Problem(file=study.shown_path, line=line, column=column, what=what, hint=hint))


def _refuse_shared_ids(study: Study, arms: list[PlannedArm]) -> None:
    first: dict[str, str] = {}
    problems = []
    for arm in arms:
        same = first.setdefault(arm.runs[0].id, arm.name)
        if same != arm.name and arm.config.data_digest:
            what = f"arm '{arm.name}' is the same as arm '{same}'"
            hint = "their data have the same content"
            problems.append(Problem(file=study.shown_path, what=what, hint=hint))
    if problems:
        raise UserError(*problems)


def _refuse_set_apart(study: Study, arms: list[PlannedArm]) -> None:
    """Raise ``UserError`` for arms whose runs the report would set apart from the baseline's."""
    shared = {arm.name: _shared(arm) for arm in arms}
    problems = []
    for arm in study.arms:
        for setting, own in shared[arm.name].items():
            usual = shared[study.baseline][setting]
            if setting in study.waive or own is None or usual is None or own == usual:
                continue
            line, column = arm.lines[setting]
            what = f"arm '{arm.name}' differs from the baseline in {setting}: expected {usual}, got {own}"
            hint = f"runs of it would not be compared: give all arms the same, or write waive: [{setting}]"
            problems.append(Problem(file=study.shown_path, line=line, column=column, what=what, hint=hint))
    if problems:
        raise UserError(*problems)


def _shared(arm: PlannedArm) -> dict[Setting, str | None]:
    config = vars(arm.config) | {"data": vars(arm.config.data), "training": vars(arm.config.training)}
    return {
        **configured(config),
        "data": arm.config.data_digest[:12] or None,
        "device": "GPU" if arm.resources.gpus else "CPU",
        "world_size": str(arm.resources.devices_per_run),
    }


def _differences(
    baseline: ResolvedArm, arm: ResolvedArm, plain: Callable[[Any], dict[str, Any]]
) -> dict[str, tuple[Any, Any]]:
    """Return the fields of an arm that differ from the baseline's, with both values."""
    pairs = {name: (getattr(baseline, name), getattr(arm, name)) for name in ("model", "data", "training")}
    if arm.recipe != baseline.recipe:
        pairs["recipe"] = (baseline.recipe_spec, arm.recipe_spec)
    differs: dict[str, tuple[Any, Any]] = {}
    for section, (common, own) in pairs.items():
        if own is not common:
            other = plain(own)
            found = ((key, (usual, other[key])) for key, usual in plain(common).items())
            differs |= {f"{section}.{key}": pair for key, pair in found if pair[0] != pair[1]}
    for name in ("backend", "trainer"):
        if getattr(arm, name) != getattr(baseline, name):
            differs[name] = (getattr(baseline, name), getattr(arm, name))
    if arm.fork != baseline.fork:
        differs["fork"] = (_fork_text(baseline), _fork_text(arm))
    return differs


def _fields(section: Any) -> dict[str, Any]:
    """Return a section's fields as plain data; of a rule of layers or a phase what is not the default."""
    return {one.name: _stated(getattr(section, one.name)) for one in fields(section)}


def _stated(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _stated(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_stated(item) for item in value]
    if not is_dataclass(value):
        return value
    usual = {one.name: one.default for one in fields(value)}
    return {
        name: _stated(getattr(value, name))
        for name, default in usual.items()
        if getattr(value, name) != default
    }


def _fork_text(arm: ResolvedArm) -> str | None:
    return None if arm.fork is None else f"from {arm.fork.parent} after {arm.fork.at:,} tokens"
