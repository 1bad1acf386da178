"""The modelled speed beside public measurements: what it is calibrated on, and what it has not seen.

    python benchmarks/speed_model.py            # the tables of docs/planning.md
    python benchmarks/speed_model.py LOGS       # and what the logs in LOGS/SUBMITTER/SYSTEM/ say themselves

``LOGS``: a folder of MLPerf logs of Llama 3.1 8B (result_*.txt), of some or all of the calibrated systems.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from ablate.modelled.measured import CALIBRATION, HELD_OUT, KERNELS, SPEED_UPS
from ablate.modelled.spread import kernel_spread, published_checks, seconds_range, speed_up
from ablate.reports.read.mllog import read_mllog

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ablate.modelled.measured import TimedStep


def step_rows(steps: Sequence[TimedStep]) -> Iterator[str]:
    """Yield a row for each step: tokens per second of a device, measured and modelled."""
    for step in steps:
        found = seconds_range(step.time)
        ends = f"{1 / found.estimate:,.0f} [{1 / found.high:,.0f}, {1 / found.low:,.0f}]"
        what = f"{step.what}, on {step.hardware}"
        cells = (what, step.source, f"{step.tokens_per_sec:,.0f}", ends, _percent(step.deviation), step.why)
        yield _row(cells)


def pair_rows(steps: Sequence[TimedStep]) -> Iterator[str]:
    """Yield a row for each hardware with two calibrated steps: how much faster NVFP4 is than FP8."""
    for slow, fast in itertools.pairwise(steps):
        if slow.hardware == fast.hardware:
            measured = fast.tokens_per_sec / slow.tokens_per_sec
            found = speed_up(slow.time.by_kernel(), fast.time.by_kernel())
            what = f"{fast.what} over FP8, on {fast.hardware}"
            ends = f"{found.estimate:.2f}× [{found.low:.2f}, {found.high:.2f}]"
            off = _percent(found.estimate / measured - 1)
            yield _row((what, "the steps above", f"{measured:.2f}×", ends, off, ""))


def speed_up_rows() -> Iterator[str]:
    """Yield a row for each published speed-up."""
    for check, one in zip(published_checks(), SPEED_UPS, strict=True):
        found = check.modelled
        cells = (
            *(check.what, check.source, f"{'> ' if check.at_least else ''}{check.published:.2f}×"),
            f"{found.estimate:.2f}× [{found.low:.2f}, {found.high:.2f}]",
            *(_percent(check.deviation), one.why),
        )
        yield _row(cells)


def logged(folder: Path) -> float:
    """Return tokens per second of one of eight devices: the median of the logs' medians."""
    runs = (read_mllog(path)[0] for path in sorted(folder.glob("result_*.txt")))
    return median(median(rate for _, rate in run.throughput) / 8 for run in runs if run is not None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("logs", nargs="?", type=Path, help="a folder of MLPerf logs")
    args = parser.parse_args()
    print("Shares of B300's peaks that kernels reach:\n")
    for what, rate, share in KERNELS:
        print(_row((what, rate, f"{share:.2f}")))
    print(f"\nSpread of a kind of kernel: {kernel_spread():.3f}. Tokens/s of a device, calibrated:\n")
    print(*step_rows(CALIBRATION), *pair_rows(CALIBRATION), sep="\n")
    print("\nHeld out:\n")
    print(*step_rows(HELD_OUT), *speed_up_rows(), sep="\n")
    if args.logs:
        print("\nLogs: as the table has it, and as read now:\n")
        for step in CALIBRATION:
            folder = args.logs / (step.logs or "")
            now = f"{logged(folder):,.0f}" if folder.is_dir() else "no such folder"
            print(_row((step.logs or "", f"{step.tokens_per_sec:,.0f}", now)))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _percent(value: float) -> str:
    return f"{value:+.1%}".replace("%", " %").replace("-", "−")


if __name__ == "__main__":
    main()
