"""Study → plan: every arm with every seed, with ids. Pure: the same study and data give the same plan.

Planning learns two things from outside: the identity of the data (``identify``, called once for each distinct
data section), and the code of models and trainers of the user's own (``foreign``). It uses no clock, no
random numbers, and no torch for built-in models.

How it fails: ``UserError`` for missing data files (all data sections at once), for code that cannot be used,
and for two arms whose data differ only in name, which are one arm. With ``without_data`` a study without its
data still gets a plan: ``missing`` says what is wrong, and no run has an id.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ablate.base.errors import Problem, UserError
from ablate.models.arithmetic import Batches, ModelSize, batches, model_size, outlined_size
from ablate.plan.diagnosed import check_layers
from ablate.plan.foreign import Foreigners
from ablate.plan.found import Tuning, begin_tuning
from ablate.recipes import describe
from ablate.run.architecture import LinearLayer, linear_layers
from ablate.run.config import (
    ArmConfig,
    DataConfig,
    ResourcesConfig,
    Setting,
    TrainingConfig,
)
from ablate.run.ids import RunIds
from ablate.study.study import again_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ablate.base.section import Section
    from ablate.data import DataIdentity
    from ablate.recipes import Recipe
    from ablate.run.config import ModelConfig
    from ablate.run.diagnostics import Diagnostics
    from ablate.store.lock import DroppedCell, StopRule, Target
    from ablate.study import FoldedCell, ResolvedArm, Study


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """One arm with one seed. ``id`` hashes the data too, and is empty if they are missing."""

    id: str
    arm: str
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedArm:
    """One arm: its configuration and its runs, with derived figures.

    ``differs`` maps a field to the baseline's value and this arm's. ``folded``: cells of the grid with the
    same configuration. ``again``: the arm repeats the baseline with other seeds. ``tuned_from``: the arm that
    this one repeats with its tuned values.
    """

    name: str
    description: str | None
    again: bool
    recipe_text: str
    factors: dict[str, Any]
    differs: dict[str, tuple[Any, Any]]
    folded: tuple[str, ...]
    runs: tuple[PlannedRun, ...]
    config: ArmConfig
    resources: ResourcesConfig
    batches: Batches
    size: ModelSize
    layers: tuple[LinearLayer, ...]
    uncovered: tuple[str, ...]
    tuned_from: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything that a study will run. ``missing``: faults of its data, without which no run has an id.

    ``tuning``: the search before the seeds; arms with the tuned values are added once it is done.
    """

    study: str
    description: str | None
    baseline: str
    target: Target
    paired_seeds: bool
    waive: tuple[Setting, ...]
    stop: StopRule | None
    training: TrainingConfig
    arms: tuple[PlannedArm, ...]
    folded: tuple[FoldedCell, ...]
    dropped: tuple[DroppedCell, ...]
    diagnostics: Diagnostics | None = None
    missing: tuple[Problem, ...] = ()
    tuning: Tuning | None = None

    def arm(self, name: str) -> PlannedArm:
        """Return an arm by name; raises ``KeyError``."""
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise KeyError(name)

    def runs(self) -> Iterator[tuple[PlannedArm, PlannedRun]]:
        """Yield every run with its arm."""
        for arm in self.arms:
            for run in arm.runs:
                yield arm, run


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
        line, column = study.search.lines["search"]
        what, hint = "a search, not a study", f"start it with: ablate search {study.path.name}"
        raise UserError(Problem(file=str(study.path), line=line, column=column, what=what, hint=hint))
    if identify is None:
        from ablate.data import identify as identify_data

        identify = identify_data
    identities, missing = _identify_all(study, identify, without_data=without_data)
    ids = RunIds()
    differences = _Differences(next(arm for arm in study.arms if arm.name == study.baseline))
    described: dict[Recipe, str] = {}
    counted: dict[tuple[TrainingConfig, int], Batches] = {}
    sized: dict[tuple[ModelConfig, int, int], tuple[ModelSize, tuple[LinearLayer, ...], tuple[str, ...]]] = {}
    foreigners = Foreigners(study)
    folded: dict[str, list[str]] = {}
    for cell in study.folded:
        folded.setdefault(cell.into, []).append(cell.name)
    arms = []
    for arm in study.arms:  # results of one section are shared by all arms with it
        identity = identities[arm.data]
        if arm.recipe not in described:
            described[arm.recipe] = describe(arm.recipe)
        counted_key = (arm.training, arm.resources.devices_per_run)
        if counted_key not in counted:
            counted[counted_key] = batches(arm.training, arm.resources.devices_per_run)
        size_key = (arm.model, identity.vocab_size, arm.training.seq_len)
        digest = foreigners.digest(arm)
        outline = foreigners.outline(arm, identity.vocab_size)
        if size_key not in sized and outline is None:
            size = model_size(arm.model, vocab_size=identity.vocab_size, seq_len=arm.training.seq_len)
            sized[size_key] = size, linear_layers(arm.model, identity.vocab_size), ()
        elif size_key not in sized and outline is not None:
            sized[size_key] = outlined_size(outline), outline.layers, outline.other_matrices
        config = ArmConfig(
            model=arm.model,
            data=arm.data,
            data_digest=identity.digest,
            vocab_size=identity.vocab_size,
            training=arm.training,
            recipe=arm.recipe,
            backend=arm.backend,
            trainer=arm.trainer,
            code_digest=digest,
        )
        arms.append(
            PlannedArm(
                name=arm.name,
                description=arm.description,
                again=False,
                recipe_text=described[arm.recipe],
                factors=arm.factors,
                differs=differences.of(arm),
                folded=tuple(folded.get(arm.name, ())),
                runs=planned_runs(arm.name, config, study.seeds, ids),
                config=config,
                resources=arm.resources,
                batches=counted[counted_key],
                size=sized[size_key][0],
                layers=sized[size_key][1],
                uncovered=sized[size_key][2],
            )
        )
    _refuse_shared_ids(study, arms)
    check_layers(study, [layer.name for arm in arms for layer in arm.layers])
    if study.baseline_again:
        arms.append(_again(study, next(arm for arm in arms if arm.name == study.baseline), ids))
    plan = Plan(
        study=study.name,
        description=study.description,
        baseline=study.baseline,
        target=study.target,
        paired_seeds=study.paired_seeds,
        waive=study.waive,
        stop=study.stop,
        training=study.training,
        arms=tuple(arms),
        folded=study.folded,
        dropped=study.dropped,
        diagnostics=study.diagnostics,
        missing=missing,
    )
    return plan if study.tune is None else replace(plan, tuning=begin_tuning(study.name, study.tune))


def planned_runs(arm: str, config: ArmConfig, seeds: Sequence[int], ids: RunIds) -> tuple[PlannedRun, ...]:
    """Return the runs of an arm; their ids are empty if the data are missing."""
    texts = ids.of_arm(config, seeds) if config.data_digest else [""] * len(seeds)
    return tuple(PlannedRun(id=text, arm=arm, seed=seed) for text, seed in zip(texts, seeds, strict=True))


def _again(study: Study, baseline: PlannedArm, ids: RunIds) -> PlannedArm:
    """Return an arm that repeats the baseline with as many unused seeds."""
    name = again_name(baseline.name)
    first = max(study.seeds) + 1
    seeds = range(first, first + len(study.seeds))
    return replace(
        baseline,
        name=name,
        description=f"{baseline.name} with other seeds, in which nothing should be found (A/A)",
        again=True,
        factors={},
        folded=(),
        runs=planned_runs(name, baseline.config, seeds, ids),
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


def _refuse_shared_ids(study: Study, arms: list[PlannedArm]) -> None:
    first: dict[str, str] = {}
    problems = []
    for arm in arms:
        same = first.setdefault(arm.runs[0].id, arm.name)
        if same != arm.name and arm.config.data_digest:
            what = f"arm '{arm.name}' is the same as arm '{same}'"
            problems.append(Problem(file=str(study.path), what=what, hint="their data have the same content"))
    if problems:
        raise UserError(*problems)


class _Differences:
    """The differences of arms from the baseline; shared sections are compared once."""

    def __init__(self, baseline: ResolvedArm) -> None:
        self._baseline = baseline
        self._plain: dict[str, dict[str, Any]] = {}
        self._found: dict[Section, dict[str, tuple[Any, Any]]] = {}

    def of(self, arm: ResolvedArm) -> dict[str, tuple[Any, Any]]:
        differs: dict[str, tuple[Any, Any]] = {}
        for section in ("model", "data", "training"):
            differs |= self._section(section, getattr(arm, section), getattr(self._baseline, section))
        if arm.recipe != self._baseline.recipe:
            differs |= self._section("recipe", arm.recipe_spec, self._baseline.recipe_spec)
        if arm.backend != self._baseline.backend:
            differs["backend"] = (self._baseline.backend, arm.backend)
        if arm.trainer != self._baseline.trainer:
            differs["trainer"] = (self._baseline.trainer, arm.trainer)
        return differs

    def _section(self, name: str, own: Section, baseline: Section) -> dict[str, tuple[Any, Any]]:
        if own is baseline:
            return {}
        if own not in self._found:
            if name not in self._plain:
                self._plain[name] = asdict(baseline)
            found = {
                f"{name}.{key}": (self._plain[name][key], value)
                for key, value in asdict(own).items()
                if value != self._plain[name][key]
            }
            self._found[own] = found
        return self._found[own]
