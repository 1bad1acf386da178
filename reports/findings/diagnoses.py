"""What the diagnostics of a study's runs say: figures of each arm and GEMM, and a sentence for each finding.

Within a run a figure is the mean over its diagnosed layers and steps; over runs it is the mean of these, with
its t interval. How the errors of two steps are alike is read off their sketches.

How it fails: a row that is damaged is left out and counted; an arm whose runs have no diagnostics is not
there.
"""

from __future__ import annotations

import base64
import math
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ablate.recipes import GEMMS, OPERANDS
from ablate.results.intervals import Interval, mean_interval
from ablate.store.metrics import is_row, lines_of, number_in, parse_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ablate.reports.findings.results import Analysis
    from ablate.store import StudyStore

LAGS = (1, 2, 4, 8)
"""Diagnoses apart, of which the errors are compared."""
_SQRT_3 = math.sqrt(3)
_NUMBERS = ("relative_error", "gain", "bias_share", "error_energy")

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Likeness(Interval):
    """The share of the error that is the same so many diagnoses, and training tokens, later."""

    diagnoses_later: int
    tokens_later: int


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The layer with the largest error, the mean over its measurements."""

    layer: str
    relative_error: float


@dataclass(frozen=True, kw_only=True)
class OperandSummary:
    """One operand: shares of its elements, and the median crest factor of its blocks around its rotation."""

    operand: str
    clipped: float | None
    underflowed: float | None
    zeroed: float | None
    crest_before: float | None
    crest_after: float | None


@dataclass(frozen=True, kw_only=True)
class GemmSummary:
    """One GEMM of an arm. ``measurements``: layers × steps × runs; ``draws`` of each.

    ``error_over_data_noise``: energy of Wgrad's error over that of the data's noise, the median in a run;
    ``under_sqrt3``: measurements of Wgrad whose gradient's norm is under √3 times its error.
    """

    gemm: str
    measurements: int
    draws: int
    relative_error: Interval
    gain: Interval
    bias_share: Interval
    alike: tuple[Likeness, ...]
    largest: Largest
    operands: tuple[OperandSummary, ...]
    error_over_data_noise: Interval
    under_sqrt3: int


@dataclass(frozen=True, kw_only=True)
class Map:
    """A figure of an arm, mean over its runs: [layer and GEMM][tokens], None where nothing was measured."""

    figure: str
    rows: tuple[tuple[str, str], ...]
    tokens: tuple[int, ...]
    values: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, kw_only=True)
class ArmDiagnosis:
    """What was measured of one arm, in ``runs`` of its runs.

    ``what_if``: another recipe, measured on the arm's tensors, which trained nothing; None for its own.
    """

    arm: str
    what_if: str | None
    runs: int
    gemms: tuple[GemmSummary, ...]
    maps: tuple[Map, ...]


def diagnose_study(store: StudyStore, analysis: Analysis) -> tuple[tuple[ArmDiagnosis, ...], tuple[str, ...]]:
    """Return the diagnoses of each arm that has one, and a line for each file with damaged rows."""
    found, faults = [], []
    for arm in analysis.arms:
        runs = []
        for run in arm.runs:
            if run.state == "damaged":
                continue
            folder = store.run(run.run_id)
            path = folder.diagnostics_path
            content, odd = folder.rows(path, folder.status())
            faults += odd
            rows, damaged = read_rows(content)
            if damaged:
                faults.append(f"{path}: {damaged} damaged row{'' if damaged == 1 else 's'} left out")
            if rows:
                runs.append(rows)
        found += summarise_all(arm.name, runs)
    return tuple(found), tuple(faults)


def read_rows(content: bytes) -> tuple[list[Row], int]:
    """Return the rows of a file, and how many are damaged; a last line that was cut is neither."""
    rows = parse_rows(lines_of(content))
    good = [row for row in rows if _is_row(row)]
    return good, len(rows) - len(good)


def summarise_all(arm: str, runs: Sequence[Sequence[Row]]) -> list[ArmDiagnosis]:
    """Return the diagnoses of an arm from the rows of each of its runs: its own, then of ``what_if``."""
    recipes = dict.fromkeys(row.get("what_if") for rows in runs for row in rows)
    found = []
    for recipe in sorted(recipes, key=lambda recipe: recipe is not None):
        own = [[row for row in rows if row.get("what_if") == recipe] for rows in runs]
        found.append(summarise(arm, [rows for rows in own if rows], what_if=recipe))
    return found


def summarise(arm: str, runs: Sequence[Sequence[Row]], *, what_if: str | None = None) -> ArmDiagnosis:
    """Return one diagnosis of an arm, from the rows of one recipe in each of its runs."""
    gemms = tuple(
        _gemm(gemm, [[row for row in rows if row["gemm"] == gemm] for rows in runs])
        for gemm in GEMMS
        if any(row["gemm"] == gemm for rows in runs for row in rows)
    )
    maps = tuple(_map(figure, runs) for figure in ("relative_error", "bias_share", "gain"))
    return ArmDiagnosis(arm=arm, what_if=what_if, runs=len(runs), gemms=gemms, maps=maps)


def _gemm(gemm: str, runs: Sequence[Sequence[Row]]) -> GemmSummary:
    every = [row for rows in runs for row in rows]
    means = {layer: _mean(_figures(rows, "relative_error")) for layer, rows in _by_layer(every).items()}
    known = {layer: mean for layer, mean in means.items() if mean is not None}
    worst = max(known, key=known.__getitem__, default="")
    return GemmSummary(
        gemm=gemm,
        measurements=len(every),
        draws=max(row["draws"] for row in every),
        relative_error=_over_runs(runs, "relative_error"),
        gain=_over_runs(runs, "gain"),
        bias_share=_over_runs(runs, "bias_share"),
        alike=tuple(one for lag in LAGS if (one := _likeness(runs, lag)) is not None),
        largest=Largest(layer=worst, relative_error=known.get(worst, 0.0)),
        operands=tuple(_operand(name, own) for name in OPERANDS[gemm] if (own := _operands(every, name))),  # type: ignore[index]
        error_over_data_noise=_interval(_average(map(_over_noise, rows), statistics.median) for rows in runs),
        under_sqrt3=sum(
            error is not None and error * _SQRT_3 > 1 for error in _figures(every, "relative_error")
        ),
    )


def _by_layer(rows: Iterable[Row]) -> dict[str, list[Row]]:
    layers: dict[str, list[Row]] = {}
    for row in rows:
        layers.setdefault(row["layer"], []).append(row)
    return layers


def _over_runs(runs: Sequence[Sequence[Row]], figure: str) -> Interval:
    return _interval(_mean(_figures(rows, figure)) for rows in runs)


def _over_noise(row: Row) -> float | None:
    noise = row.get("data_noise")
    data = number_in(noise, "noise_energy") if isinstance(noise, dict) else None
    error = number_in(row, "error_energy")
    return error / data if data is not None and data > 0 and error is not None else None


def _likeness(runs: Sequence[Sequence[Row]], lag: int) -> Likeness | None:
    means, apart = [], []
    for rows in runs:
        pairs = [
            (first, second)
            for series in _by_layer(rows).values()
            for first, second in zip(series, series[lag:], strict=False)
            if isinstance(first.get("sketch"), str) and isinstance(second.get("sketch"), str)
        ]
        apart += [second["tokens"] - first["tokens"] for first, second in pairs]
        means.append(_mean(sketch_cosine(first["sketch"], second["sketch"]) for first, second in pairs))
    if all(mean is None for mean in means):
        return None
    tokens = round(statistics.median(apart))
    return Likeness(diagnoses_later=lag, tokens_later=tokens, **vars(_interval(means)))


def sketch_cosine(first: str, second: str) -> float | None:
    """Return the cosine of two sketched tensors: the share of the error that both steps have in common.

    For an error C + R with C the same at both steps and R drawn anew with equal energy, the cosine is
    ‖C‖² / ‖C + R‖². None for a damaged sketch.
    """
    try:
        a, b = (np.frombuffer(base64.b64decode(one), dtype=np.int8).astype(float) for one in (first, second))
    except ValueError:
        return None
    norm = math.sqrt(float(a @ a) * float(b @ b)) if a.shape == b.shape else 0.0
    return float(a @ b) / norm if norm else None


def _operands(rows: Iterable[Row], name: str) -> list[Any]:
    """Return what the rows tell of one operand."""
    told = (row.get("operands") for row in rows)
    return [operands[name] for operands in told if isinstance(operands, dict) and name in operands]


def _operand(name: str, told: Iterable[Any]) -> OperandSummary:
    own = [one for one in told if isinstance(one, dict)]
    before, after = (
        [one[when] for one in own if isinstance(one.get(when), dict)] for when in ("before", "after")
    )
    return OperandSummary(
        operand=name,
        clipped=_mean(_figures(own, "clipped")),
        underflowed=_mean(_figures(own, "underflowed")),
        zeroed=_mean(_figures(own, "zeroed")),
        crest_before=_mean(_figures(before, "crest_median")),
        crest_after=_mean(_figures(after, "crest_median")),
    )


def _map(figure: str, runs: Sequence[Sequence[Row]]) -> Map:
    cells: dict[tuple[str, str], dict[int, list[float]]] = {}
    for rows in runs:
        for row in rows:
            value = number_in(row, figure)
            own = cells.setdefault((row["layer"], row["gemm"]), {})
            if value is not None:
                own.setdefault(row["tokens"], []).append(value)
    tokens = sorted({row["tokens"] for rows in runs for row in rows})
    return Map(
        figure=figure,
        rows=tuple(cells),
        tokens=tuple(tokens),
        values=tuple(
            tuple(statistics.fmean(own[t]) if t in own else None for t in tokens) for own in cells.values()
        ),
    )


def _is_row(row: Any) -> bool:
    return (
        is_row(row, "diagnosis")
        and type(row.get("draws")) is int
        and row["draws"] > 0
        and row.get("gemm") in GEMMS
        and isinstance(row.get("layer"), str)
        and isinstance(row.get("what_if", ""), str)
        and all(row.get(name) is None or number_in(row, name) is not None for name in _NUMBERS)
    )


def _figures(rows: Iterable[Row], figure: str) -> list[float | None]:
    return [number_in(row, figure) for row in rows]


def _mean(values: Iterable[float | None]) -> float | None:
    return _average(values, statistics.fmean)


def _average(values: Iterable[float | None], by: Callable[[list[float]], float]) -> float | None:
    known = [value for value in values if value is not None]
    return by(known) if known else None


def _interval(values: Iterable[float | None]) -> Interval:
    """Return the interval of the known values, without a note."""
    return replace(mean_interval([value for value in values if value is not None]), note=None)
