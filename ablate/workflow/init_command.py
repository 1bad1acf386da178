"""What ``ablate init --command --log`` does: a first study of a program that trains by itself, from its log.

How it fails: with a ``UserError`` that names the option, before anything is written; for a log of no known
form it proposes a pattern from the log's own lines.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from ablate.base.errors import UserError, as_user_error
from ablate.plan import build_plan
from ablate.plan.pilot import SHARES
from ablate.run.evaluations import AmbiguousError, Places, RunRows, named
from ablate.run.log_formats import FORMATS
from ablate.run.log_rows import LogReader, LogSource
from ablate.run.log_text import texts_of
from ablate.run.loss_units import UNIT_NAMES, stored_unit
from ablate.study.load import study_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

_COMMAND_STUDY = """\
# A study of a command that trains by itself: docs/training-scripts.md says what each key does.
name: {name}
baseline: bf16
target: {{val_loss: {target:.4g}}} # {unit}; the log reaches it after {part:.0%} of its tokens
seeds: 3
base:
  trainer:
    command: {words}
    metrics: {metrics}
  # Correct these: {{steps}} is tokens / (seq_len × batch_size), {steps:,} in the log.
  training: {{tokens: {tokens}, seq_len: {seq_len}, batch_size: {batch_size}}}
arms:
{arms}"""
_ARMS = """\
  # Your flags for each arm; or recipes: megatron-te and {recipe_args}, for flags from ablate's recipes.
  bf16: {trainer: {precision: BF16}}
  fp4: {trainer: {precision: FP4, args: [--fp4]}}
"""
_ADAPTERS_ARMS = """\
  # `ablate recipes` lists more.
  bf16: {recipe: bf16}
  mxfp4: {recipe: mxfp4}
  mxfp4 + dht: {recipe: {gemms: [fprop, dgrad, wgrad], stabiliser: dht}}
"""
_BY_PATTERN = """
    # The recipe in its environment; its losses by the pattern, not by the adapter.
    recipes: environment
    expect: ["ablate: the model follows recipe"]"""


_SUFFIXES = {"csv": ".csv", "json": ".json"}
_STEP = re.compile(r"(?i)\b((?:step|iter(?:ation)?|update)s?\W{0,4})(\d[\d,]*)\b")
_STEP_GROUP = r"(?P<step>\d[\d,]*)"
_LOSS = re.compile(
    r"(?i)\b((?:val|valid|validation|eval|dev)\w*[ _/.-]*(?:\w+[ _/.-]+)?(?:loss|bpb|nll)\W{0,4})(\d+\.\d+)"
)


@dataclass(frozen=True, kw_only=True)
class _Log:
    """What a log holds: how it was read, its text, its evaluations, and how many other rows it has."""

    source: LogSource
    text: str
    num_rows: int
    sets: tuple[str, ...]
    evals: tuple[dict[str, Any], ...]


def write_command_study(
    path: Path,
    command: str,
    *,
    log: Path,
    patterns: Sequence[str] = (),
    ask: Callable[[UserError], str] | None = None,
) -> str:
    """Write a study of a command to ``path``, from a log of it; return lines that say what the log holds.

    ``patterns``: regular expressions for a log that none of the known trainers writes. ``ask``: is told why
    a log cannot be read, and returns a pattern for it.

    Raises:
        UserError: the log has no validation loss that can be read, or the study cannot be planned as written.
    """
    if path.exists():
        raise UserError(
            "is there already, and is left as it is",
            file=path,
            hint="give another name",
        )
    while True:
        try:
            contents = _read(log, patterns)
            break
        except UserError as error:
            if ask is None or not log.exists():
                raise
            patterns = [ask(error)]
    text = _study_text(path, command, contents)
    build_plan(study_of(text.encode(), path))
    path.write_text(text, encoding="utf-8")
    source = contents.source
    first = contents.evals[0]
    last = contents.evals[-1]
    rows = f"{len(contents.evals):,} evaluations and {contents.num_rows:,} other rows"
    if source.preset:
        rows += f" ({source.preset})"
    if len(contents.sets) > 1:
        rows += f" on set {source.set} of {', '.join(contents.sets)} (metrics.set names another)"
    return (
        f"{log}: {rows}, in {UNIT_NAMES[stored_unit(source.loss_unit)]}: "
        f"from {first['val_loss']:g} at {named(first)} to {last['val_loss']:g} at {named(last)}.\n"
        f"Written: {path}. Correct training and the arms."
    )


def _study_text(path: Path, command: str, log: _Log) -> str:
    words = shlex.split(command)
    scripts = [path.parent / word for word in words if (path.parent / word).is_file()]
    is_adapted = any(b"ablate.integrations" in file.read_bytes() for file in scripts)
    if "{args}" not in words and not is_adapted:
        words.append("{args}")
    batch = re.search(r'(?:global batch size|"train_batch_size"):\s*(\d+)', log.text)
    seq_len = 1024
    batch_size = int(batch[1]) if batch else 1
    last = log.evals[-1]
    if last.get("step"):
        steps = int(last["step"])
    elif last.get("samples"):
        steps = int(last["samples"] / batch_size)
    else:
        steps = int(last.get("tokens", 0) / (seq_len * batch_size))
    unit = next(key for key in ("tokens", "samples", "step") if key in last)
    target = np.interp(
        SHARES[0] * last[unit],
        [row[unit] for row in log.evals],
        [row["val_loss"] for row in log.evals],
    )
    in_study = log.source
    if is_adapted and not log.source.patterns:
        in_study = LogSource(preset="ablate")
    written = {name: value for name, value in vars(in_study).items() if value}
    metrics = json.dumps(written)
    if is_adapted and log.source.patterns:
        metrics += _BY_PATTERN
    return _COMMAND_STUDY.format(
        name=path.stem,
        target=math.ceil(target * 1000) / 1000,
        unit=UNIT_NAMES[stored_unit(in_study.loss_unit)],
        part=SHARES[0],
        words=json.dumps(words),
        metrics=metrics,
        steps=steps,
        tokens=steps * seq_len * batch_size,
        seq_len=seq_len,
        batch_size=batch_size,
        arms=_ADAPTERS_ARMS if is_adapted else _ARMS,
    )


def _read(log: Path, patterns: Sequence[str]) -> _Log:
    """Read a log by the patterns, or by the known format that finds the most evaluations.

    Raises:
        UserError: it has no validation loss that can be read, or it can be read in two ways.
    """
    try:
        if patterns:
            sources = [LogSource(patterns=list(patterns))]
        else:
            sources = [*_known_sources(log)]
    except ValidationError as error:
        raise UserError(f"--pattern: {error.errors()[0]['msg']}") from None
    if not sources[0].has_place:
        raise UserError("--pattern: no group (?P<step>…), tokens or samples")
    best_source = sources[0]
    best_texts: list[str] = []
    most_evals = 0
    for source in sources:
        with as_user_error(f"--log: cannot read {log}"):
            texts = [text for _, text in texts_of(log, source)]
        reader = LogReader(source)
        num_evals = sum(
            "val_loss" in row for text in texts for row in reader.rows(text)
        )
        if num_evals > most_evals or source is sources[0]:
            best_source = source
            best_texts = texts
            most_evals = num_evals
    if not most_evals:
        raise _no_loss(log, best_texts, has_patterns=bool(patterns))
    return _with_evaluations(log, best_source, best_texts)


def _known_sources(log: Path) -> Iterator[LogSource]:
    """Yield each known format in which this file may be."""
    suffix = log.suffix if log.suffix in _SUFFIXES.values() else None
    for name, form in FORMATS.items():
        if form.form == "events" or _SUFFIXES.get(form.form) != suffix:
            continue
        file = None
        if not form.form.endswith("lines"):
            file = f"{{run_dir}}/**/{form.files[0]}"
        yield LogSource(preset=name, file=file)


def _with_evaluations(log: Path, source: LogSource, texts: Sequence[str]) -> _Log:
    reader = LogReader(source)
    is_repeated = source.preset is not None and FORMATS[source.preset].repeats
    run = RunRows(places=Places(float, 1), is_repeated=is_repeated)
    num_rows = 0
    for text in texts:
        for row in reader.rows(text):
            run.add(row)
            num_rows += 1
    if len(reader.sets) > 1 and source.set is None:
        return _with_evaluations(
            log, replace(source, set=next(iter(reader.sets))), texts
        )
    try:
        read = run.evaluations()
    except AmbiguousError as error:
        raise UserError(f"--log: {log}: {error}") from None
    if not read.rows:
        raise UserError(f"--log: every validation loss in {log} is no number")
    evals = tuple(dict(row) for row in read.rows)
    return _Log(
        source=source,
        sets=tuple(reader.sets),
        text="\n".join(texts),
        num_rows=num_rows - len(evals),
        evals=evals,
    )


def _no_loss(log: Path, texts: Sequence[str], *, has_patterns: bool) -> UserError:
    names = ", ".join(FORMATS)
    reason = "its patterns find none" if has_patterns else f"it is no log of {names}"
    proposed = _propose_patterns(texts)
    hint = "--pattern 'step (?P<step>\\d+).*val_loss (?P<val_loss>\\S+)'"
    if proposed:
        hint = " ".join(f"--pattern '{pattern}'" for pattern in proposed)
    elif any("'eval_loss':" in text for text in texts):  # as Trainer prints it
        hint = "Hugging Face's Trainer prints no step: give its checkpoint-…/trainer_state.json as --log"
    return UserError(f"--log: no validation loss in {log}: {reason}", hint=hint)


def _propose_patterns(texts: Sequence[str]) -> list[str]:
    """Propose patterns from the lines that repeat: of a loss, and of its step if that has its own line."""
    forms = Counter[str]()
    for text in texts:
        if (loss := _LOSS.search(text)) is None:
            continue
        step = _STEP.search(text)
        loss_part = _literal(loss[1]) + r"(?P<val_loss>\S+)"
        if step is None:
            forms[loss_part] += 1
            continue
        step_part = _literal(step[1]) + _STEP_GROUP
        if step.start() < loss.start():
            parts = [step_part, loss_part]
        else:
            parts = [loss_part, step_part]
        forms[".*?".join(parts)] += 1
    if not forms:
        return []
    pattern = forms.most_common(1)[0][0]
    if "(?P<step>" in pattern:
        return [pattern]
    steps = Counter(_literal(step[1]) for text in texts if (step := _STEP.search(text)))
    if not steps:
        return []
    return [steps.most_common(1)[0][0] + _STEP_GROUP, pattern]


def _literal(text: str) -> str:
    """Escape a text for a pattern; spaces stay legible."""
    return re.escape(text).replace("\\ ", " ")
