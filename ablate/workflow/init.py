"""What ``ablate init`` does between its answers and its last line: a first study that fits corpus and budget.

The model and the data are looked at, the arms' steps are timed here (or modelled, where that would take
minutes), and the tokens of a run are what the budget pays for. The text is planned before it is written, so
that ``ablate plan`` takes it as it is.

How it fails: with a ``UserError`` that names the option, before anything is written.
"""

from __future__ import annotations

import math
import os
import re
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate.base.errors import Problem, UserError
from ablate.plan import Plan, StudyProgress, build_plan, estimate
from ablate.plan.estimate import duration_text
from ablate.study.load import study_of
from ablate.study.template import (
    SEEDS,
    Starter,
    known_arms,
    model_section,
    named_arms,
    starter_text,
)
from ablate.workflow import Listener

if TYPE_CHECKING:
    from collections.abc import Iterator

USED = 0.8
"""The share of the budget that is planned: runs side by side slow each other, and Ray has to start."""
EVALUATIONS = 20
_FEWEST_STEPS = 5 * EVALUATIONS
_EXACT_BYTES = 32 << 20
"""A corpus up to this size is made into tokens to count them; a larger one holds out enough for any use."""
_UNITS = {
    "s": 1,
    "sec": 1,
    "m": 60,
    "min": 60,
    "h": 3600,
    "hour": 3600,
    "hours": 3600,
    "d": 86_400,
    "days": 86_400,
}
_SIZES = (
    (20e6, {"seq_len": 128, "batch_size": 16, "learning_rate": 2e-3, "eval_tokens": 16_384}),
    (500e6, {"seq_len": 512, "batch_size": 32, "learning_rate": 6e-4, "eval_tokens": 65_536}),
    (math.inf, {"seq_len": 2048, "batch_size": 64, "learning_rate": 3e-4, "eval_tokens": 65_536}),
)
"""Usual settings by the number of parameters below which they are taken."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The answers to the questions of ``ablate init``, as words of the command line.

    ``data``: None for the standard library's text.
    """

    model: str = "built-in"
    data: str | None = None
    arms: str = "ladder"
    budget: str = "30m"


def seconds_of(budget: str) -> float:
    """Return the seconds of a duration such as ``90s``, ``30m``, ``2h`` or ``1.5d``.

    Raises:
        UserError: it is none, or zero.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", budget.lower())
    if found is None or found[2] not in _UNITS or float(found[1]) == 0:
        number = re.match(r"\s*(\d+(?:\.\d+)?)", budget)
        hint = (
            f"did you mean '{number[1]}h'?"
            if number and float(number[1])
            else "expected such as 30m, 2h or 1d"
        )
        raise UserError(f"'{budget}' is no time", hint=hint)
    return float(found[1]) * _UNITS[found[2]]


def _budget_of(seconds: float) -> str:
    """Return a budget that holds so many seconds, as ``seconds_of`` reads it."""
    unit = next(unit for unit in ("d", "h", "m") if seconds > 2 * _UNITS[unit] or unit == "m")
    return f"{math.ceil(seconds / _UNITS[unit])}{unit}"


def data_section(place: str | None, folder: Path) -> dict[str, Any]:
    """Return the section ``data`` for a file, folder or glob; None: the standard library's text.

    ``folder``: where the study file is to stand; its paths are relative to that.

    Raises:
        UserError: there is no such text, or it needs to be described by hand.
    """
    from ablate.data.sources import JSON_SUFFIXES, TEXT_SUFFIXES, TOKEN_SUFFIXES, find_files

    if place is None:
        return {"source": "stdlib", "tokenizer": "bytes"}
    path = Path(place).expanduser()
    by_hand = "write the section data by hand, see docs/data.md"
    if place.startswith("hub:"):
        raise UserError(f"{place}: a data set of the hub is not looked at here", hint=by_hand)
    if place.lower().endswith(TOKEN_SUFFIXES):
        raise UserError(f"{place}: the size of a token file's vocabulary is not known", hint=by_hand)
    source = "text"
    if place.lower().endswith(JSON_SUFFIXES):
        source = "jsonl"
    elif path.is_dir():
        names = [name.lower() for _, _, files in os.walk(path) for name in files]
        is_text = any(name.endswith(TEXT_SUFFIXES) for name in names)
        source = "text" if is_text or not any(name.endswith(JSON_SUFFIXES) for name in names) else "jsonl"
    with _without_hint("relative paths start at the study file"):
        find_files([place], JSON_SUFFIXES if source == "jsonl" else TEXT_SUFFIXES)
    return {"source": source, "paths": [_from(place, folder)], "tokenizer": "bytes"}


@contextmanager
def _without_hint(hint: str) -> Iterator[None]:
    """Leave out a hint that holds for study files alone."""
    try:
        yield
    except UserError as error:
        raise UserError(
            *(replace(one, hint=None) if one.hint == hint else one for one in error.problems)
        ) from None


def _from(place: str, folder: Path) -> str:
    """Return a path as the study file has to write it."""
    path = Path(place).expanduser()
    return str(path) if path.is_absolute() else os.path.relpath(path, folder)


@dataclass(frozen=True, kw_only=True)
class Written:
    """A study that was written: what it has planned for, in wall seconds, and how that is known."""

    runs: int
    tokens: int
    seconds: float
    ground: str


def write_study(path: Path, answers: Answers, storage: Path, listener: Listener | None = None) -> Written:
    """Write a first study to ``path``. ``storage``: where a corpus's tokens are kept, as a run keeps them.

    Raises:
        UserError: an answer that cannot be used, with its option; a file that is there already.
    """
    listener = listener or Listener()
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"FILE: '{path}' has no name of a study file", hint=f"did you mean '{path}.yaml'?")
    if path.exists():
        raise UserError("is there already, and is left as it is", file=path, hint="give another name")
    with _naming("--budget"):
        budget = seconds_of(answers.budget)
    with _naming("--arms"):
        known_arms(answers.arms)
    with _naming("--data"):
        data = data_section(answers.data, path.parent)
    starter = _first(path, answers, data)
    with _naming("FILE"):
        study_of(starter_text(_baseline_of(starter)), path)
    with _naming("--model"):
        starter = _with_model(starter, answers.model, path)
    with _naming("--data"):
        starter, there = _with_corpus(starter, path, storage, listener)
    with _naming("--model"):
        starter, plan = _with_arms(starter, path)
    with _naming("--budget"):
        starter, written = _with_budget(starter, plan, path, answers.budget, budget, listener)
    times = written.tokens / there
    if times > 1:
        said = f"{starter.about['tokens']} A run sees the text {times:,.1f} times."
        starter = replace(starter, about={**starter.about, "tokens": said})
    _plan(starter, path)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(starter_text(starter))
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror or error}", file=path) from None
    return written


@contextmanager
def _naming(option: str) -> Iterator[None]:
    """Put the option before a problem, in place of a line of the file that is not written yet."""
    try:
        yield
    except UserError as error:
        raise UserError(
            *(Problem(what=f"{option}: {_without_place(one)}", hint=one.hint) for one in error.problems[:1])
        ) from None


def _without_place(problem: Problem) -> str:
    is_of_the_study = problem.line is not None or problem.file is None
    return problem.what if is_of_the_study else f"{problem.file}: {problem.what}"


def _first(path: Path, answers: Answers, data: dict[str, Any]) -> Starter:
    """Return a starter with settings that every model can be planned with."""
    settings = _SIZES[0][1]
    said = "The text of --data, a token a byte; a part is held out for validation (docs/data.md)."
    if answers.data is None:
        said = "Source text of Python's standard library, a token a byte. Your own: docs/data.md."
    return Starter(
        name=path.stem,
        file=path.name,
        model={},
        data=data,
        arms=answers.arms,
        training={**settings, **_steps(2 * _FEWEST_STEPS, settings), "schedule": "constant"},
        about={"model": "", "data": said, "tokens": "", "eval_tokens": ""},
    )


def _steps(steps: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of training that follow from the number of optimizer steps."""
    tokens = steps * settings["seq_len"] * settings["batch_size"]
    return {
        "tokens": tokens,
        "eval_every_tokens": tokens // EVALUATIONS,
        "warmup_tokens": tokens // EVALUATIONS,
    }


def _plan(starter: Starter, path: Path) -> Plan:
    return build_plan(study_of(starter_text(starter), path))


def _baseline_of(starter: Starter) -> Starter:
    return replace(starter, arms=None)


def _with_model(starter: Starter, word: str, path: Path) -> Starter:
    """Add the model, with what no recipe reaches in it, and settings for its size."""
    from ablate.models.arithmetic import parameters_text

    model = model_section(word)
    for key in ("hf", "function"):
        place, colon, name = model.get(key, "").partition(":")
        if place and Path(place).exists():
            model[key] = f"{_from(place, path.parent)}{colon}{name}"
    starter = replace(starter, model=model)
    arm = study_of(starter_text(_baseline_of(starter)), path).arms[0]
    said = "An output head and tables of embeddings keep high precision."
    if not arm.model.is_built_in:
        from ablate.models.custom_models import outline
        from ablate.recipes.coverage import in_short

        found = outline(arm.model, vocab_size=256, seq_len=arm.training.seq_len)
        hidden = [one.name for one in found.matrices if one.out_of_reach is not None and not one.is_head]
        if hidden:
            starter = replace(starter, model={**model, "allow": in_short(hidden, "{}")})
            said = "No recipe reaches the matrices under allow: they keep high precision in every arm."
    size = _plan(_baseline_of(starter), path).arms[0].size
    assert size is not None  # a starter has no trainer of its own
    settings = next(settings for bound, settings in _SIZES if size.parameters < bound)
    what = {"hf": "A Hugging Face model with random weights", "function": "Your own model"}
    kind = next((text for key, text in what.items() if key in model), "A built-in decoder")
    return replace(
        starter,
        training={**starter.training, **settings, **_steps(2 * _FEWEST_STEPS, settings)},
        about={**starter.about, "model": f"{kind}, {parameters_text(size.parameters)} parameters. {said}"},
    )


def _with_corpus(starter: Starter, path: Path, storage: Path, listener: Listener) -> tuple[Starter, int]:
    """Set ``eval_tokens`` to what the corpus holds out; return how many training tokens it has, too."""
    from ablate.data import identify, prepare

    data = study_of(starter_text(_baseline_of(starter)), path).arms[0].data
    seq_len, wanted = starter.training["seq_len"], starter.training["eval_tokens"]
    if (num_bytes := identify(data).num_bytes) > _EXACT_BYTES:
        said = "validation tokens of an evaluation, the same for all runs"
        return replace(starter, about={**starter.about, "eval_tokens": said}), num_bytes
    with listener.preparing() as show:
        files = prepare(data, storage / "tokens", progress=lambda done, what: show("", done, what))
    there = (files.validation_tokens - 1) // seq_len * seq_len
    if there < seq_len or files.train_tokens <= seq_len:
        counts = f"{files.train_tokens:,} training and {files.validation_tokens:,} validation tokens"
        raise UserError(f"{counts} hold no sequence of {seq_len}", hint="name more text")
    said = f"of the {files.validation_tokens:,} validation tokens; the same for all runs"
    training = {**starter.training, "eval_tokens": min(wanted, there)}
    about = {**starter.about, "eval_tokens": said}
    return replace(starter, training=training, about=about), files.train_tokens


def _with_arms(starter: Starter, path: Path) -> tuple[Starter, Plan]:
    """Leave out the arms that the model cannot take.

    Raises:
        UserError: it can take none.
    """
    try:
        return starter, _plan(starter, path)
    except UserError as error:
        names, first = named_arms(starter.arms), error
    left_out = {}
    for name in names:
        try:
            _plan(replace(starter, left_out=dict.fromkeys({*names} - {name}, "")), path)
        except UserError as error:
            left_out[name] = error.problems[0].what.removesuffix(f"; arm '{name}'")
    if len(left_out) == len(names):
        raise first
    starter = replace(starter, left_out=left_out)
    return starter, _plan(starter, path)


def _with_budget(
    starter: Starter, plan: Plan, path: Path, budget: str, seconds: float, listener: Listener
) -> tuple[Starter, Written]:
    """Set the tokens of a run to what the budget pays for.

    Raises:
        UserError: the budget pays for too few steps.
    """
    from ablate.backends.device import default_device

    if on_gpu := default_device() != "cpu":
        starter = replace(starter, gpus=1)
        plan = _plan(starter, path)
    speeds, ground = _speeds(plan, listener)
    progress, cores = StudyProgress(states={}, tokens_per_sec=speeds), os.cpu_count() or 1

    def taken(steps: int) -> float:
        one = _plan(
            replace(starter, training={**starter.training, **_steps(steps, dict(starter.training))}), path
        )
        found = estimate(one, progress, cores=cores).wall_seconds
        assert found is not None  # a starter has no trainer of its own
        return found

    # Evaluations are as many in any budget: the time is a straight line over the steps.
    few, many = taken(_FEWEST_STEPS), taken(2 * _FEWEST_STEPS)
    per_step = (many - few) / _FEWEST_STEPS
    steps = int(_FEWEST_STEPS + (USED * seconds - few) / per_step) // EVALUATIONS * EVALUATIONS
    runs = len(plan.arms) * SEEDS
    if steps < _FEWEST_STEPS:
        least = f"{runs} runs of {_FEWEST_STEPS} steps take about {duration_text(few)}"
        hint = f"give {_budget_of(few / USED)} or more, or a smaller --model"
        raise UserError(f"{least} ({ground}), more than {USED:.0%} of {budget}", hint=hint)
    chosen = _steps(steps, dict(starter.training))
    starter = replace(starter, training={**starter.training, **chosen})
    wall = few + per_step * (steps - _FEWEST_STEPS)
    where = "a GPU" if on_gpu else f"{cores} cores"
    said = f"{runs} runs of so many tokens take about {duration_text(wall)} on {where}, of {budget} asked for"
    starter = replace(starter, about={**starter.about, "tokens": f"{said} ({ground})."})
    return starter, Written(runs=runs, tokens=chosen["tokens"], seconds=wall, ground=ground)


def _speeds(plan: Plan, listener: Listener) -> tuple[dict[str, float], str]:
    """Return tokens per second by arm, none where they are not measured, and how they are known."""
    from ablate.workflow.speeds import arm_speeds

    base = plan.arm(plan.baseline)
    costs = estimate(plan, StudyProgress(states={}, tokens_per_sec={}), cores=os.cpu_count() or 1)
    found = arm_speeds(
        plan.arms, plan.baseline, listener, seconds_per_step=costs.run_seconds[base.name] / base.batches.steps
    )
    if found is None:
        return {}, "modelled as `ablate plan` does: an order of magnitude, and emulated formats take longer"
    speeds, others = found
    beside = f", beside other work: {others}" if others else ""
    return {one.arm: one.median for one in speeds}, f"measured: two steps of each arm on this machine{beside}"
