"""The arm and the seed of a run, by the names of runs, files and folders."""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from ablate.run.log_rows import number

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from ablate.reports.read.imported import ImportedRun

_SEED = re.compile(r"(?:^|[/._-])(?:seed|version|run)[=_-]?(\d+)")
_LAST_NUMBER = re.compile(r"(.*)[/._-]\d+(?=[/._-]|$)")
"""A number that is no part of a word: the 0 of bf16-0, not the 16."""


def by_pattern(
    runs: Sequence[ImportedRun], arms: Mapping[str, Sequence[str]], faults: list[str]
) -> dict[str, list[ImportedRun]]:
    """Sort runs into arms by shell patterns on their names; a run that matches no arm is a fault."""
    runs_by_arm: dict[str, list[ImportedRun]] = {arm: [] for arm in arms}
    for run in runs:
        for arm, patterns in arms.items():
            if any(fnmatchcase(run.name, pattern) for pattern in patterns):
                runs_by_arm[arm].append(run)
                break
        else:
            listed = ", ".join(itertools.chain.from_iterable(arms.values()))
            faults.append(f"{run.source}: in no arm (patterns: {listed})")
    return runs_by_arm


def seeds_by_names(
    arms: Mapping[str, Sequence[ImportedRun]],
) -> tuple[dict[str, list[ImportedRun]], list[str]]:
    """Give runs without a seed that of their name, or of their file's; also return a line for each arm."""
    seeded: dict[str, list[ImportedRun]] = {}
    lines: list[str] = []
    for arm, runs in arms.items():
        seeded[arm] = list(runs)
        if any(run.seed is not None for run in runs):
            continue
        names = [run.name or PurePath(run.source).stem for run in runs]
        if len({*names}) < len(names):  # the folders tell them apart
            names = [str(PurePath(run.source).with_suffix("")) for run in runs]
        seeds = _differing_numbers(names)
        if seeds:
            seeded[arm] = [
                replace(run, seed=seed_of(seed))
                for run, seed in zip(runs, seeds, strict=True)
            ]
            lines.append(
                f"{arm}: seeds {', '.join(seeds)} by the names ({names[0]}, …)"
            )
    return seeded, lines


def arms_by_folders(files: Collection[Path]) -> dict[Path, str]:
    """Name each file's arm: its path below the folder of all, without its seed and a name that all files have.

    The seed is the number after ``seed``, ``version`` or ``run``, else the last that is no part of a word; the
    name is empty where nothing else is left.
    """
    if not files:
        return {}
    folder = os.path.commonpath([file.parent for file in files])
    names = [file.relative_to(folder).with_suffix("") for file in files]
    if len({name.name for name in names}) == 1:
        names = [name.parent for name in names]
    arms = {}
    for file, name in zip(files, names, strict=True):
        text = _SEED.sub("", str(name))
        if text == str(name):
            text = _LAST_NUMBER.sub(r"\1", text)
        arms[file] = text.strip("/._-")
    return arms


def _differing_numbers(names: Sequence[str]) -> Sequence[str]:
    """Return the number after ``seed``, or the one number in which names differ; none if nothing tells it."""
    seeds: list[str] = []
    texts = set()
    numbers = []
    for name in names:
        seeds += _SEED.findall(name)
        texts.add(re.sub(r"\d+", "0", name))
        numbers.append(re.findall(r"\d+", name))
    if len(seeds) == len({*seeds}) == len(names):
        return seeds
    if len(texts) > 1:
        return ()
    differing = [column for column in zip(*numbers, strict=True) if len({*column}) > 1]
    if len(differing) == 1 and len({*differing[0]}) == len(names):
        return differing[0]
    return ()


def seed_of(value: Any) -> int | str | None:
    """Return an integer seed as int, any other as text, and None if empty."""
    if value in ("", None):
        return None
    seed = number(value)
    if seed is not None and abs(seed) < 1 << 53 and seed.is_integer():
        return int(seed)
    return str(value).strip()
