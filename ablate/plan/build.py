"""Study → plan: every arm with every seed, with ids. Pure: the same study and data give the same plan.

Planning learns two things from outside: the identity of the data (``identify``, called once for each distinct
data section), and the code of the user's own models and trainers (``OwnCode``). It uses no clock, no random
numbers, and no torch for built-in models.

How it fails: ``UserError`` for missing data files (all data sections at once), for code that cannot be used,
for two arms that are one arm because their data differ only in name, and for an arm whose runs the report
would not compare with the baseline's. With ``without_data`` a study without its data still gets a plan:
``missing`` says what is wrong, and no run has an id.
"""

from __future__ import annotations

import math
from dataclasses import asdict, fields, is_dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from ablate.base.errors import Problem, UserError
from ablate.models.arithmetic import ModelSize, model_size, outlined_size
from ablate.plan.layers import OwnCode, check_diagnosed
from ablate.plan.plan import Plan, PlannedArm, planned_runs
from ablate.plan.tuning import tuned_plan
from ablate.recipes import describe
from ablate.run.architecture import LinearLayer, linear_layers
from ablate.run.config import ArmConfig, Fork, configured
from ablate.run.schedule import plan_steps
from ablate.store.plan_file import Question
from ablate.study.study import again_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ablate.data import DataIdentity
    from ablate.run.config import DataConfig, Setting
    from ablate.study import ResolvedArm, Study


def code_warning(study: Study) -> str | None:
    """Return a warning with the names of the user's code that a study executes; None if it has none."""
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
        hint = "start it with: ablate search"
        raise UserError(study.problem(("search",), "a search, not a study", hint))
    identities, missing = _identify_all(study, identify, without_data=without_data)
    baseline = next(arm for arm in study.arms if arm.name == study.baseline)
    # Arms with the same section share its results.
    described, counted = cache(describe), cache(plan_steps)
    sized, laid_out, plain = cache(model_size), cache(linear_layers), cache(_stated)
    own_code = OwnCode(study)
    parents = {arm.name: arm for arm in study.arms}
    folded: dict[str, list[str]] = {}
    for cell in study.folded:
        folded.setdefault(cell.into, []).append(cell.name)
    arms = []
    for arm in study.arms:
        identity = identities[arm.data]
        code_digest = own_code.digest(arm)
        outline = own_code.outline(arm, identity.vocab_size)
        size: ModelSize | None = None
        layers: tuple[LinearLayer, ...] = ()
        if arm.model.describes(arm.trainer):
            size = sized(arm.model, vocab_size=identity.vocab_size, seq_len=arm.training.seq_len)
            layers = laid_out(arm.model, identity.vocab_size)
        elif outline is not None:
            size, layers = outlined_size(outline), outline.layers
        fork = None
        if arm.fork is not None:
            parent = parents[arm.fork.arm]
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
        )
        batches = counted(arm.training, arm.resources.devices_per_run)
        arms.append(
            PlannedArm(
                name=arm.name,
                description=arm.description,
                recipe=described(arm.recipe),
                tokens=batches.tokens,
                factors=arm.factors,
                differs=_differences(baseline, arm, plain),
                folded=tuple(folded.get(arm.name, ())),
                fork=arm.fork,
                runs=planned_runs(config, study.seeds),
                config=config,
                resources=arm.resources,
                batches=batches,
                size=size,
                layers=layers,
                coverage=None if outline is None else outline.coverage(arm.recipe),
            )
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
    check_diagnosed(study, {arm.name: arm.layers for arm in arms})
    if study.baseline_again:  # with as many unused seeds
        first, own = max(study.seeds) + 1, next(arm for arm in arms if arm.name == study.baseline)
        again = replace(
            own,
            name=again_name(own.name),
            description=f"{own.name} with other seeds, in which nothing should be found (A/A)",
            again=True,
            factors={},
            folded=(),
            runs=planned_runs(own.config, range(first, first + len(study.seeds))),
        )
        arms.append(again)
    plan = Plan(
        **{field.name: getattr(study, field.name) for field in fields(Question)},
        study=study.name,
        training=asdict(study.training),
        arms=tuple(arms),
        folded=study.folded,
        diagnostics=study.diagnostics,
        missing=missing,
        keep_weights=study.keep_weights,
    )
    if study.tune is None:
        return plan
    return tuned_plan(plan, study.tune)


def _identify_all(
    study: Study, identify: Callable[[DataConfig], DataIdentity] | None, *, without_data: bool
) -> tuple[dict[DataConfig, DataIdentity], tuple[Problem, ...]]:
    """Return the identity of each data section, and the faults found.

    Data that cannot be used get an identity without a digest, if the size of their vocabulary is known.
    """
    from ablate.data import identity

    identify = identify or identity.identify
    identities: dict[DataConfig, DataIdentity] = {}
    problems: dict[Problem, None] = {}
    sections = dict.fromkeys(arm.data for arm in study.arms)
    for data in sections:
        try:
            identities[data] = identify(data)
        except UserError as error:
            problems |= dict.fromkeys(error.problems)
            vocab_size = data.vocab_size or (identity.BYTES_VOCABULARY if data.tokenizer == "bytes" else None)
            if vocab_size is not None:
                identities[data] = identity.DataIdentity(digest="", vocab_size=vocab_size, num_bytes=0)
    if problems and not (without_data and len(identities) == len(sections)):
        raise UserError(*problems)
    return identities, tuple(problems)


def _not_comparable(study: Study, arms: list[PlannedArm]) -> Iterator[Problem]:
    """Yield arms that are the same run, and settings for which the report would not compare an arm's runs."""
    first: dict[str, str] = {}
    for arm in arms:
        same = first.setdefault(arm.runs[0].id, arm.name)
        if same != arm.name and arm.config.data_digest:
            what = f"arm '{arm.name}' is the same as arm '{same}'"
            yield Problem(file=study.shown_path, what=what, hint="their data have the same content")
    shared = {arm.name: _shared(arm) for arm in arms}
    for one in study.arms:
        for setting, own in shared[one.name].items():
            usual = shared[study.baseline][setting]
            if setting not in study.waive and own and usual and own != usual:
                what = f"arm '{one.name}' differs from the baseline in {setting}: expected {usual}, got {own}"
                hint = f"its runs would not be compared: give all arms the same, or write waive: [{setting}]"
                yield study.problem(study.where(one, setting), what, hint)


def _shared(arm: PlannedArm) -> dict[Setting, str | None]:
    config = vars(arm.config) | {"data": vars(arm.config.data), "training": vars(arm.config.training)}
    return {
        **configured(config),
        "data": arm.config.data_digest[:12],
        "device": "GPU" if arm.resources.gpus else "CPU",
        "world_size": str(arm.resources.devices_per_run),
    }


def _differences(
    baseline: ResolvedArm, arm: ResolvedArm, plain: Callable[[Any], dict[str, Any]]
) -> dict[str, tuple[Any, Any]]:
    """Return the fields that differ, such as ``training.tokens``, with the baseline's and the arm's value."""
    pairs = {name: (getattr(baseline, name), getattr(arm, name)) for name in ("model", "data", "training")}
    if arm.recipe != baseline.recipe:
        pairs["recipe"] = (baseline.recipe_spec, arm.recipe_spec)
    differs: dict[str, tuple[Any, Any]] = {}
    for section, (common, own) in pairs.items():
        if own is not common:
            other = plain(own)
            differs |= {f"{section}.{key}": (usual, other[key]) for key, usual in plain(common).items()}
    differs |= {name: (getattr(baseline, name), getattr(arm, name)) for name in ("backend", "trainer")}
    differs["fork"] = (_fork_text(baseline), _fork_text(arm))
    return {name: pair for name, pair in differs.items() if pair[0] != pair[1]}


def _stated(section: Any, *, whole: bool = True) -> Any:
    """Turn a section into plain data, and leave the default values of nested parts out."""
    if isinstance(section, dict):
        return {name: _stated(item, whole=False) for name, item in section.items()}
    if isinstance(section, list | tuple):
        return [_stated(item, whole=False) for item in section]
    if not is_dataclass(section):
        return section
    own = {one.name: (getattr(section, one.name), one.default) for one in fields(section)}
    return {name: _stated(item, whole=False) for name, (item, usual) in own.items() if whole or item != usual}


def _fork_text(arm: ResolvedArm) -> str | None:
    return None if arm.fork is None else f"from {arm.fork.arm} after {arm.fork.tokens:,} tokens"
