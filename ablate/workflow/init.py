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

from ablate.base.counts import count_text
from ablate.base.errors import Problem, UserError, as_user_error
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
    from collections.abc import Iterator

    from ablate.plan import PlannedArm
    from ablate.workflow import Listener

USED = 0.8
"""The share of the budget that is planned: runs side by side slow each other, and Ray has to start."""
EVALUATIONS = 20
_FEWEST_STEPS = 5 * EVALUATIONS
_EXACT_BYTES = 32 << 20
"""A corpus up to this size is tokenised to count its tokens; a larger one holds out enough for any use."""
_KINDS = {
    "hf": "A Hugging Face model with random weights",
    "function": "Your own model",
}
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_SETTINGS = ("seq_len", "batch_size", "learning_rate", "eval_tokens")
_SIZES = (
    (20e6, (128, 16, 2e-3, 16_384)),
    (500e6, (512, 32, 6e-4, 65_536)),
    (math.inf, (2048, 64, 3e-4, 65_536)),
)
"""Usual settings of training, for models with fewer parameters than the number before them."""
_ON_GPU = (256, 64, 2e-3, 65_536)
"""Those of the smallest models on a GPU, which a step of 2,048 tokens would leave waiting."""


def data_section(place: str | None, folder: Path) -> dict[str, Any]:
    """Make the section ``data`` for a file, folder or glob; None: the standard library's text.

    ``folder``: the folder of the study file; paths are relative to it.

    Raises:
        UserError: there is no such text, or it needs to be described by hand.
    """
    from ablate.data.sources import (
        JSON_SUFFIXES,
        PATHS_HINT,
        TEXT_SUFFIXES,
        TOKEN_SUFFIXES,
        find_files,
    )

    if place is None:
        return {"source": "stdlib", "tokenizer": "bytes"}
    if place.startswith("hub:") or place.lower().endswith(TOKEN_SUFFIXES):
        raise UserError(
            f"{place} is no text",
            hint="write the section data by hand, see docs/data.md",
        )
    try:
        files = find_files([place], TEXT_SUFFIXES + JSON_SUFFIXES)
    except UserError as error:
        (problem,) = error.problems
        if problem.hint == PATHS_HINT:  # it holds in study files only
            problem = replace(problem, hint=None)
        raise UserError(problem) from None
    is_json = all(file.path.lower().endswith(JSON_SUFFIXES) for file in files)
    return {
        "source": "jsonl" if is_json else "text",
        "paths": [_from(place, folder)],
        "tokenizer": "bytes",
    }


def _from(place: str, folder: Path) -> str:
    """Make a path relative to the study file's folder, unless it is absolute."""
    path = Path(place).expanduser()
    if path.is_absolute():
        return str(path)
    return os.path.relpath(path, folder)


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
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(
            f"FILE: '{path}' has no name of a study file",
            hint=f"did you mean '{path}.yaml'?",
        )
    if path.exists():
        raise UserError(
            "is there already, and is left as it is",
            file=path,
            hint="give another name",
        )
    with _naming("--budget"):
        budget_sec = _seconds_of(answers.budget)
    with _naming("--arms"):
        arm_names = list(arms_of(answers.arms))
    with _naming("--data"):
        section = data_section(answers.data, path.parent)
    draft = _Draft(path, storage, answers, section)
    # First settings that every model can be planned with.
    draft.use_settings(_SIZES[0][1])
    with _naming("FILE" if answers.tokenizer == "bytes" else "--tokenizer"):
        draft.plan(arms=None)
    with _naming("--model"):
        arm = draft.choose_model()
    with _naming("--data"):
        draft.fit_evaluations_to(arm, listener)
    with _naming("--model"):
        draft.leave_out_misfits(arm_names)
    with _naming("--budget"):
        estimated = draft.fit_steps_to(budget_sec, listener)
    draft.plan()
    with (
        as_user_error(f"{path}: cannot be written"),
        path.open("x", encoding="utf-8") as file,
    ):
        file.write(starter_text(draft.starter))
    return f"{path}: {estimated}"


def _seconds_of(time: str) -> float:
    """Read a time such as 30m, 2h or 1d."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", time.lower())
    if match is None or match[2] not in _UNITS or float(match[1]) == 0:
        raise UserError(f"'{time}' is no time", hint="expected such as 30m, 2h or 1d")
    return float(match[1]) * _UNITS[match[2]]


class _Draft:
    """A study before it is written: each step fills in a part of the starter, and plans it."""

    def __init__(
        self, path: Path, storage: Path, answers: Answers, data: dict[str, Any]
    ) -> None:
        from ablate.backends.device import default_device

        tokenizer, colon, detail = answers.tokenizer.partition(":")
        data["tokenizer"] = tokenizer
        if tokenizer == "hf":
            if Path(detail).exists():
                detail = _from(detail, path.parent)
            data["tokenizer_path"] = detail
        elif colon:
            data["vocab_size"] = int(detail) if detail.isdecimal() else detail
        if answers.tokenizer == "bytes":
            unit = "a token a byte"
        else:
            unit = f"tokens of {answers.tokenizer}"
        if answers.data is None:
            about = f"Source text of Python's standard library, {unit}. Your own: docs/data.md."
        else:
            about = f"The text of --data, {unit}; a part is held out for validation (docs/data.md)."
        self.path = path
        self.storage = storage
        self.model = answers.model
        self.settings: dict[str, Any] = {}
        self.starter = Starter(
            name=path.stem,
            file=path.name,
            data=data,
            arms=answers.arms,
            seeds=answers.seeds,
            about_data=about,
            on_gpu=default_device() != "cpu",
        )

    def plan(self, **changes: Any) -> Plan:
        """Plan the study as it is now, but for ``changes`` of the starter."""
        text = starter_text(replace(self.starter, **changes))
        return build_plan(study_of(text.encode(), self.path))

    def use_settings(self, settings: tuple[float, ...]) -> None:
        """Take these settings of training, for a few steps."""
        self.settings = dict(zip(_SETTINGS, settings, strict=True))
        self.set_steps(2 * _FEWEST_STEPS)

    def set_steps(self, steps: int) -> None:
        """Set the keys of training, with those that follow from the number of optimizer steps."""
        tokens = steps * self.settings["seq_len"] * self.settings["batch_size"]
        every = tokens // EVALUATIONS
        self.starter.training = {
            **self.settings,
            "schedule": "constant",
            "tokens": tokens,
            "eval_every_tokens": every,
            "warmup_tokens": every,
        }

    def choose_model(self) -> PlannedArm:
        """Fill in the model, and settings of training for its size; return its baseline."""
        from ablate.recipes.coverage import in_short

        starter = self.starter
        section = model_section(self.model, on_gpu=starter.on_gpu)
        kind = "A built-in decoder"
        for key, title in _KINDS.items():
            if key not in section:
                continue
            kind = title
            place, colon, name = section[key].partition(":")
            if Path(place).exists():
                section[key] = f"{_from(place, self.path.parent)}{colon}{name}"
        starter.model = section
        arm = self.plan(arms=None).arms[0]
        assert arm.size is not None  # a starter has no trainer of its own
        reached = "An output head and tables of embeddings keep high precision."
        hidden = [
            matrix.name
            for matrix in (arm.coverage.matrices if arm.coverage else ())
            if matrix.out_of_reach is not None and not matrix.is_head
        ]
        if hidden:
            section["allow"] = in_short(hidden, "{}")
            reached = "No recipe reaches the matrices under allow: they keep high precision in every arm."
        starter.about_model = (
            f"{kind}, {count_text(arm.size.parameters, ' ')} parameters. {reached}"
        )
        settings = [row for most, row in _SIZES if arm.size.parameters < most]
        is_small = len(settings) == len(_SIZES)
        self.use_settings(_ON_GPU if is_small and starter.on_gpu else settings[0])
        return arm

    def fit_evaluations_to(self, arm: PlannedArm, listener: Listener) -> None:
        """Take as many tokens of an evaluation as the corpus holds out; a large one holds out enough."""
        from ablate.data import identify, prepare

        corpus = arm.config.data
        if identify(corpus).num_bytes > _EXACT_BYTES:
            return
        with listener.preparing() as show:
            files = prepare(
                corpus,
                self.storage / "tokens",
                progress=lambda fraction, what: show("", fraction, what),
            )
        seq_len = self.settings["seq_len"]
        held_out = (files.validation_tokens - 1) // seq_len * seq_len
        if held_out < seq_len or files.train_tokens <= seq_len:
            counts = f"{files.train_tokens:,} training and {files.validation_tokens:,} validation tokens"
            raise UserError(
                f"{counts} hold no sequence of {seq_len}", hint="name more text"
            )
        self.settings["eval_tokens"] = min(self.settings["eval_tokens"], held_out)
        self.set_steps(2 * _FEWEST_STEPS)

    def leave_out_misfits(self, arm_names: list[str]) -> None:
        """Leave out the arms that do not fit the model, if one arm is left."""
        try:
            self.plan()
        except UserError:
            reasons = {}
            for name in arm_names:
                others = [other for other in arm_names if other != name]
                try:
                    self.plan(left_out=dict.fromkeys(others, ""))
                except UserError as error:
                    reasons[name] = error.problems[0].what.removesuffix(
                        f"; arm '{name}'"
                    )
            if len(reasons) < len(arm_names):
                self.starter.left_out = reasons
            self.plan()

    def fit_steps_to(self, budget_sec: float, listener: Listener) -> str:
        """Fill in how many tokens a run gets; return what all runs come to."""
        from ablate.workflow import pilot

        plan = self.plan()
        progress = StudyProgress(states={}, tokens_per_sec={})
        progress, timed = pilot.with_timed_steps(plan, progress, listener)
        ground = "at an assumed rate: an order of magnitude, and emulated formats take longer"
        if timed:
            ground = "measured: two steps of each arm on this machine"
            if timed.other_work:
                ground += f", beside other work: {timed.other_work}"

        def seconds_of(steps: int) -> float:
            self.set_steps(steps)
            return (
                estimate(self.plan(), progress, cores=os.cpu_count() or 1).wall_seconds
                or 0.0
            )

        # The number of evaluations is the same for any budget, so that time is linear in the steps.
        fewest_sec = seconds_of(_FEWEST_STEPS)
        sec_per_step = (seconds_of(2 * _FEWEST_STEPS) - fewest_sec) / _FEWEST_STEPS
        more_steps = (USED * budget_sec - fewest_sec) / sec_per_step
        steps = int(_FEWEST_STEPS + more_steps) // EVALUATIONS * EVALUATIONS
        num_runs = len(plan.arms) * self.starter.seeds
        if steps < _FEWEST_STEPS:
            minutes = math.ceil(fewest_sec / USED / 60)
            time = f"{minutes}m"
            if minutes >= 60:
                time = f"{math.ceil(minutes / 6) / 10:g}h"
            raise UserError(
                f"{num_runs} runs of {_FEWEST_STEPS} steps take about {duration_text(fewest_sec)} ({ground})",
                hint=f"give {time} or more, a smaller --model, or fewer --seeds",
            )
        self.set_steps(steps)
        duration = f"about {duration_text(fewest_sec + sec_per_step * (steps - _FEWEST_STEPS))}"
        self.starter.about_tokens = (
            f"{num_runs} runs of so many tokens take {duration} here ({ground})."
        )
        tokens = self.starter.training["tokens"]
        return f"{num_runs} runs of {tokens:,} tokens, {duration} in all ({ground})."


@contextmanager
def _naming(option: str) -> Iterator[None]:
    """Put the option before a problem, in place of its line: the file is not written yet."""
    try:
        yield
    except UserError as error:
        first = error.problems[0]
        place = ""
        if first.file is not None and first.line is None:
            place = f"{first.file}: "
        raise UserError(
            Problem(what=f"{option}: {place}{first.what}", hint=first.hint)
        ) from None
