"""What ``ablate init`` does between its answers and its last line: a first study that fits corpus and budget.

The model and the data are looked at, the arms' steps are timed here (or modelled, if timing would take
minutes), and a run gets the tokens that the budget pays for. The text is planned before it is written, so
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
    BUILT_IN,
    Starter,
    arms_of,
    model_section,
    starter_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ablate.workflow import Listener

USED = 0.8
"""The share of the budget that is planned: runs side by side slow each other, and Ray has to start."""
EVALUATIONS = 20
_FEWEST_STEPS = 5 * EVALUATIONS
_EXACT_BYTES = 32 << 20
"""A corpus up to this size is tokenised to count its tokens; a larger one holds out enough for any use."""
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_SIZES: tuple[tuple[float, dict[str, Any]], ...] = (
    (20e6, {"seq_len": 128, "batch_size": 16, "learning_rate": 2e-3, "eval_tokens": 16_384}),
    (500e6, {"seq_len": 512, "batch_size": 32, "learning_rate": 6e-4, "eval_tokens": 65_536}),
    (math.inf, {"seq_len": 2048, "batch_size": 64, "learning_rate": 3e-4, "eval_tokens": 65_536}),
)
"""Usual settings of training, for models with fewer parameters than the number before them."""
_ON_GPU = {"seq_len": 256, "batch_size": 64, "learning_rate": 2e-3, "eval_tokens": 65_536}
"""Those of the smallest models on a GPU, which a step of 2,048 tokens would leave waiting."""


def data_section(place: str | None, folder: Path) -> dict[str, Any]:
    """Make the section ``data`` for a file, folder or glob; None: the standard library's text.

    ``folder``: the folder of the study file; paths are relative to it.

    Raises:
        UserError: there is no such text, or it needs to be described by hand.
    """
    from ablate.data.sources import JSON_SUFFIXES, TEXT_SUFFIXES, TOKEN_SUFFIXES, find_files

    if place is None:
        return {"source": "stdlib", "tokenizer": "bytes"}
    if place.startswith("hub:") or place.lower().endswith(TOKEN_SUFFIXES):
        raise UserError(f"{place} is no text", hint="write the section data by hand, see docs/data.md")
    try:
        files = find_files([place], TEXT_SUFFIXES + JSON_SUFFIXES)
    except UserError as error:  # drop a hint that is for study files only
        raise UserError(
            *(replace(one, hint=None) if "study file" in str(one.hint) else one for one in error.problems)
        ) from None
    is_json = all(file.path.lower().endswith(JSON_SUFFIXES) for file in files)
    return {"source": "jsonl" if is_json else "text", "paths": [_from(place, folder)], "tokenizer": "bytes"}


def _from(place: str, folder: Path) -> str:
    """Make a path relative to the study file's folder, unless it is absolute."""
    path = Path(place).expanduser()
    return str(path) if path.is_absolute() else os.path.relpath(path, folder)


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What a first study is made for: the words of the command line.

    ``data``: None for the standard library's text. ``seeds``: the number of runs of each arm.
    """

    model: str = BUILT_IN
    data: str | None = None
    arms: str = "ladder"
    budget: str = "30m"
    seeds: int = 3
    tokenizer: str = "bytes"


def write_study(path: Path, storage: Path, answers: Answers, listener: Listener) -> str:
    """Write a first study to ``path``; return a line that says what was planned.

    ``storage``: where the corpus's tokens are kept, as for a run.

    Raises:
        UserError: a word that cannot be used, with its option; a file that is there already.
    """
    from ablate.backends.device import default_device
    from ablate.data import identify, prepare
    from ablate.recipes.coverage import in_short
    from ablate.run.architecture import parameters_text
    from ablate.workflow import pilot

    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"FILE: '{path}' has no name of a study file", hint=f"did you mean '{path}.yaml'?")
    if path.exists():
        raise UserError("is there already, and is left as it is", file=path, hint="give another name")
    with _naming("--budget"):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", answers.budget.lower())
        if found is None or found[2] not in _UNITS or float(found[1]) == 0:
            raise UserError(f"'{answers.budget}' is no time", hint="expected such as 30m, 2h or 1d")
        seconds = float(found[1]) * _UNITS[found[2]]
    with _naming("--arms"):
        names = arms_of(answers.arms)
    with _naming("--data"):
        section = data_section(answers.data, path.parent)
    section["tokenizer"], colon, own = answers.tokenizer.partition(":")
    if section["tokenizer"] == "hf":
        section["tokenizer_path"] = _from(own, path.parent) if Path(own).exists() else own
    elif colon:
        section["vocab_size"] = int(own) if own.isdecimal() else own
    a_token = "a token a byte" if answers.tokenizer == "bytes" else f"tokens of {answers.tokenizer}"
    said = f"The text of --data, {a_token}; a part is held out for validation (docs/data.md)."
    if answers.data is None:
        said = f"Source text of Python's standard library, {a_token}. Your own: docs/data.md."
    starter = Starter(
        name=path.stem,
        file=path.name,
        data=section,
        arms=answers.arms,
        seeds=answers.seeds,
        about_data=said,
        on_gpu=default_device() != "cpu",
    )

    def train(steps: int, settings: Mapping[str, Any]) -> None:
        """Set the keys of training, and those that follow from the number of optimizer steps."""
        tokens = steps * settings["seq_len"] * settings["batch_size"]
        every = tokens // EVALUATIONS
        starter.training = {**settings, "tokens": tokens, "eval_every_tokens": every, "warmup_tokens": every}

    def plan(**changes: Any) -> Plan:
        return build_plan(study_of(starter_text(replace(starter, **changes)).encode(), path))

    # First settings that every model can be planned with.
    train(2 * _FEWEST_STEPS, _SIZES[0][1] | {"schedule": "constant"})
    with _naming("FILE" if answers.tokenizer == "bytes" else "--tokenizer"):
        plan(arms=None)
    with _naming("--model"):
        named = model_section(answers.model, on_gpu=starter.on_gpu)
        for key in ("hf", "function"):
            place, colon, name = named.get(key, "").partition(":")
            if place and Path(place).exists():
                named[key] = f"{_from(place, path.parent)}{colon}{name}"
        starter.model = named
        arm = plan(arms=None).arms[0]
        assert arm.size is not None  # a starter has no trainer of its own
        size = arm.size.parameters
        reached = "An output head and tables of embeddings keep high precision."
        matrices = () if arm.coverage is None else arm.coverage.matrices
        if hidden := [one.name for one in matrices if one.out_of_reach is not None and not one.is_head]:
            named["allow"] = in_short(hidden, "{}")
            reached = "No recipe reaches the matrices under allow: they keep high precision in every arm."
        settings = next(settings for bound, settings in _SIZES if size < bound)
        if starter.on_gpu and settings is _SIZES[0][1]:
            settings = _ON_GPU
        settings = settings | {"schedule": "constant"}
        train(2 * _FEWEST_STEPS, settings)
        what = {"hf": "A Hugging Face model with random weights", "function": "Your own model"}
        kind = next((text for key, text in what.items() if key in named), "A built-in decoder")
        starter.about_model = f"{kind}, {parameters_text(size)} parameters. {reached}"
    with _naming("--data"):  # as many tokens of an evaluation as the corpus holds out
        corpus, seq_len = arm.config.data, settings["seq_len"]
        if identify(corpus).num_bytes <= _EXACT_BYTES:
            with listener.preparing() as show:
                files = prepare(corpus, storage / "tokens", progress=lambda done, what: show("", done, what))
            there = (files.validation_tokens - 1) // seq_len * seq_len
            if there < seq_len or files.train_tokens <= seq_len:
                counts = f"{files.train_tokens:,} training and {files.validation_tokens:,} validation tokens"
                raise UserError(f"{counts} hold no sequence of {seq_len}", hint="name more text")
            settings["eval_tokens"] = min(settings["eval_tokens"], there)
            train(2 * _FEWEST_STEPS, settings)
    with _naming("--model"):  # without the arms that do not fit it, if one is left
        try:
            plan()
        except UserError:
            left_out = {}
            for name in names:
                try:
                    plan(left_out=dict.fromkeys({*names} - {name}, ""))
                except UserError as error:
                    left_out[name] = error.problems[0].what.removesuffix(f"; arm '{name}'")
            if len(left_out) < len(names):
                starter.left_out = left_out
            plan()
    with _naming("--budget"):
        whole, cores = plan(), os.cpu_count() or 1
        nothing = StudyProgress(states={}, tokens_per_sec={})
        progress, timed = pilot.with_timed_steps(whole, nothing, listener)
        ground = "at an assumed rate: an order of magnitude, and emulated formats take longer"
        if timed:
            beside = f", beside other work: {timed.other_work}" if timed.other_work else ""
            ground = f"measured: two steps of each arm on this machine{beside}"

        def taken(steps: int) -> float:
            train(steps, settings)
            return estimate(plan(), progress, cores=cores).wall_seconds or 0.0

        # The number of evaluations is the same for any budget, so that time is linear in the steps.
        few, many = taken(_FEWEST_STEPS), taken(2 * _FEWEST_STEPS)
        per_step = (many - few) / _FEWEST_STEPS
        steps = int(_FEWEST_STEPS + (USED * seconds - few) / per_step) // EVALUATIONS * EVALUATIONS
        runs = len(whole.arms) * answers.seeds
        if steps < _FEWEST_STEPS:
            least = f"{runs} runs of {_FEWEST_STEPS} steps take about {duration_text(few)} ({ground})"
            minutes = math.ceil(few / USED / 60)
            time = f"{minutes}m" if minutes < 60 else f"{math.ceil(minutes / 6) / 10:g}h"
            hint = f"give {time} or more, a smaller --model, or fewer --seeds"
            raise UserError(least, hint=hint)
        train(steps, settings)
        wall = f"about {duration_text(few + per_step * (steps - _FEWEST_STEPS))}"
        starter.about_tokens = f"{runs} runs of so many tokens take {wall} here ({ground})."
    plan()
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(starter_text(starter))
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror or error}", file=path) from None
    return f"{path}: {runs} runs of {starter.training['tokens']:,} tokens, {wall} in all ({ground})."


@contextmanager
def _naming(option: str) -> Iterator[None]:
    """Put the option before a problem, in place of its line: the file is not written yet."""
    try:
        yield
    except UserError as error:
        first = error.problems[0]
        place = f"{first.file}: " if first.file is not None and first.line is None else ""
        raise UserError(Problem(what=f"{option}: {place}{first.what}", hint=first.hint)) from None
