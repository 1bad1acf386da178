"""Figures of each arm and GEMM from the diagnostics of a study's runs.

Within a run a figure is the mean over its diagnosed layers and steps; over runs it is the mean of these, with
its t interval. The similarity of the errors at two steps is computed from their sketches.

Rows are as they were written: the run store vouches for them by a hash. How it fails: a file with a row
that this does not know is left out, and named; an arm whose runs have no diagnostics is left out.
"""

from __future__ import annotations

import base64
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import TypedDict  # pydantic asks for it before Python 3.12

from ablate.recipes import GEMMS, OPERANDS, Gemm
from ablate.results.intervals import Interval, mean_interval
from ablate.store.metrics import lines_of, rows_of
from ablate.store.records import Count, Number, Text, Tokens, checked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ablate.reports.findings.results import Analysis
    from ablate.store import StudyStore

MAPPED = ("relative_error", "bias_share", "gain")
_FIGURES = (*MAPPED, "zeros", "zeros_bf16")
_SQRT_3 = math.sqrt(3)

Row = dict[str, Any]


class _Operand(TypedDict):
    clipped: Number | None
    zeroed: Number | None
    crest_before: Number | None
    crest_after: Number | None


class _Noise(TypedDict):
    noise_energy: Number


class _Diagnosis(TypedDict):
    """What is read of a row of one GEMM, in ``diagnostics.jsonl``."""

    kind: Text
    tokens: Tokens
    layer: Text
    gemm: Gemm
    draws: Count
    relative_error: Number | None
    bias_share: Number | None
    gain: Number | None
    error_energy: Number | None
    zeros: Number | None
    zeros_bf16: Number | None
    sketch: Text | None
    operands: dict[str, _Operand]
    data_noise: _Noise | None


class _Load(TypedDict):
    kind: Text
    busiest: Number


@dataclass(frozen=True, kw_only=True)
class Likeness(Interval):
    """The share of the error that is still the same at the next diagnosis, so many training tokens later."""

    tokens_later: int


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The layer with the largest relative error, as the mean over its measurements."""

    layer: str
    relative_error: float


@dataclass(frozen=True, kw_only=True)
class OperandSummary:
    """One operand: shares of its elements, and its blocks' median crest factor before and after rotation."""

    operand: str
    clipped: float | None
    zeroed: float | None
    crest_before: float | None
    crest_after: float | None


@dataclass(frozen=True, kw_only=True)
class GemmSummary:
    """One GEMM of an arm. ``measurements``: layers × steps × runs, each with ``draws``.

    ``zeros``: share of the output's elements that are exactly zero; ``zeros_bf16``: of the exact one in bf16.
    ``error_over_data_noise``: energy of Wgrad's error over that of the data's noise, the median in a run;
    ``under_sqrt3``: number of measurements of Wgrad whose gradient norm is under √3 times the error's.
    """

    gemm: str
    measurements: int
    draws: int
    relative_error: Interval
    gain: Interval
    bias_share: Interval
    zeros: Interval
    zeros_bf16: Interval
    alike: Likeness | None
    largest: Largest
    operands: tuple[OperandSummary, ...]
    error_over_data_noise: Interval
    under_sqrt3: int


@dataclass(frozen=True, kw_only=True)
class Map:
    """A figure of an arm, mean over its runs: ``values[row][tokens]``, None without a measurement."""

    figure: str
    rows: tuple[tuple[str, str], ...]
    tokens: tuple[int, ...]
    values: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, kw_only=True)
class ArmDiagnosis:
    """What was measured of one arm, in ``runs`` of its runs.

    ``busiest``: the tokens of a mixture's busiest expert over the mean of its experts; None without experts.
    """

    arm: str
    runs: int
    gemms: tuple[GemmSummary, ...]
    maps: tuple[Map, ...]
    busiest: Interval | None = None


def diagnose_study(
    store: StudyStore, analysis: Analysis
) -> tuple[tuple[ArmDiagnosis, ...], tuple[str, ...]]:
    """Diagnose each arm that has rows; also return a line for each file that is left out."""
    diagnosed = []
    faults = []
    for arm in analysis.arms:
        rows_of_runs = []
        for result in arm.runs:
            if result.state == "damaged":
                continue
            run = store.run(result.run_id)
            content, damage = run.rows(run.diagnostics_path, run.status())
            faults += damage
            try:
                rows_of_runs.append(read_rows(content))
            except ValueError as error:
                faults.append(f"{run.diagnostics_path}: {error}")
        if any(rows_of_runs):
            diagnosed.append(diagnose_arm(arm.name, rows_of_runs))
    return tuple(diagnosed), tuple(faults)


def read_rows(content: bytes) -> list[Row]:
    """Return the rows of a file; a last line that was cut is none.

    Raises:
        ValueError: a row with a value of another type; one line that names the place.
    """
    lines = lines_of(content)
    loads: list[Any] = checked(list[_Load], rows_of(lines, "load"))
    return [*checked(list[_Diagnosis], rows_of(lines, "diagnosis")), *loads]


def diagnose_arm(arm: str, rows_of_runs: Sequence[Sequence[Row]]) -> ArmDiagnosis:
    """Diagnose an arm from the rows of each of its runs."""
    rows = []
    loads = []
    for run, run_rows in enumerate(rows_of_runs):
        for row in run_rows:
            if row["kind"] == "load":
                loads.append(row | {"run": run})
            else:
                rows.append(row | {"run": run, "over_noise": _over_noise(row)})
    gemms = []
    for gemm in GEMMS:
        gemm_rows = [row for row in rows if row["gemm"] == gemm]
        if gemm_rows:
            gemms.append(_summary(gemm, gemm_rows))
    return ArmDiagnosis(
        arm=arm,
        runs=len({row["run"] for row in rows or loads}),
        gemms=tuple(gemms),
        maps=tuple(_map(figure, rows) for figure in MAPPED),
        busiest=_over_runs(loads, "busiest") if loads else None,
    )


def _map(figure: str, rows: Sequence[Row]) -> Map:
    means = _means(rows, ("layer", "gemm", "tokens"), figure)
    operations = tuple(dict.fromkeys((row["layer"], row["gemm"]) for row in rows))
    tokens = tuple(sorted({row["tokens"] for row in rows}))
    values = tuple(
        tuple(means.get((*operation, place)) for place in tokens)
        for operation in operations
    )
    return Map(figure=figure, rows=operations, tokens=tokens, values=values)


def _over_noise(row: Row) -> float | None:
    """Return the energy of the error over that of the data's noise; None where either is not known."""
    if row["data_noise"] is None or row["error_energy"] is None:
        return None
    noise = row["data_noise"]["noise_energy"]
    return row["error_energy"] / noise if noise > 0 else None


def _means(
    rows: Iterable[Row],
    by: Sequence[str],
    figure: str,
    mean: Callable[[Any], float] = statistics.fmean,
) -> dict[tuple[Any, ...], float]:
    """Average the known figures of each group; a group without any is left out."""
    groups: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for row in rows:
        if row[figure] is not None:
            groups[tuple(row[key] for key in by)].append(row[figure])
    return {key: mean(values) for key, values in groups.items()}


def _summary(gemm: Gemm, rows: Sequence[Row]) -> GemmSummary:
    layers = _means(rows, ("layer",), "relative_error") or {("",): 0.0}
    largest = max(layers, key=layers.__getitem__)
    operands = []
    for name in OPERANDS[gemm]:
        operand_rows = [
            row["operands"][name] for row in rows if name in row["operands"]
        ]
        if operand_rows:
            figures = {}
            for figure in _Operand.__annotations__:
                figures[figure] = _means(operand_rows, (), figure).get(())
            operands.append(OperandSummary(operand=name, **figures))
    return GemmSummary(
        gemm=gemm,
        measurements=len(rows),
        draws=max(row["draws"] for row in rows),
        **{figure: _over_runs(rows, figure) for figure in _FIGURES},
        alike=_likeness(rows),
        largest=Largest(layer=largest[0], relative_error=layers[largest]),
        operands=tuple(operands),
        error_over_data_noise=_over_runs(rows, "over_noise", statistics.median),
        under_sqrt3=sum((row["relative_error"] or 0.0) * _SQRT_3 > 1 for row in rows),
    )


def _over_runs(
    rows: Iterable[Row], figure: str, mean: Callable[[Any], float] = statistics.fmean
) -> Interval:
    """Return the mean over runs with its interval, but without a note; empty without a known figure."""
    means = _means(rows, ("run",), figure, mean)
    return replace(mean_interval(list(means.values())), note=None)


def _likeness(rows: Iterable[Row]) -> Likeness | None:
    series: dict[tuple[int, str], list[Row]] = defaultdict(list)
    for row in rows:
        series[row["run"], row["layer"]].append(row)
    cosines = []
    tokens_between = []
    for layer_rows in series.values():
        for first, second in pairwise(layer_rows):
            if first["sketch"] and second["sketch"]:
                tokens_between.append(second["tokens"] - first["tokens"])
                cosine = sketch_cosine(first["sketch"], second["sketch"])
                cosines.append({"run": first["run"], "cosine": cosine})
    mean = _over_runs(cosines, "cosine")
    if mean.estimate is None:
        return None
    return Likeness(tokens_later=round(statistics.median(tokens_between)), **vars(mean))


def sketch_cosine(first: str, second: str) -> float | None:
    """Compute the cosine of two sketched tensors: the share of the error that both steps have in common.

    For an error C + R with C the same at both steps and R drawn anew with equal energy, the cosine is
    ‖C‖² / ‖C + R‖². None for a damaged sketch.
    """
    try:
        a = _sketched(first)
        b = _sketched(second)
    except ValueError:
        return None
    if a.shape != b.shape:
        return None
    norm = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / norm if norm else None


def _sketched(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=np.int8).astype(float)
