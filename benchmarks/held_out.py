"""Intervals on real runs: those of some seeds against what the other seeds of the same study say.

python benchmarks/held_out.py [MLPERF]     # a line a number of seeds

Of every study some seeds make the interval, and the mean of the others stands for the truth. Its own error is
allowed for: the half width is taken times √(1 + n / rest). ``MLPERF``: a folder of systems' logs, of which
each in turn is the baseline of the others.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from findings import rebuild

from ablate.reports import analyse, load_frames
from ablate.reports.findings.effects import Design, averages, log_tokens_by_seed
from ablate.reports.read.mllog import read_mllog
from ablate.results.ends import run_ends
from ablate.results.intervals import Method, contrasts, t_interval
from ablate.run.outcome import find_crossing
from ablate.store import StudyStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ablate.reports import Analysis

    Logs = dict[str, dict[int, float]]
    Pair = tuple[str, str]
    Study = tuple[Logs, str]


def findings(storage: Path) -> Iterator[Study]:
    """Yield arm → seed → log tokens to target, and the baseline's name, of each study of the findings."""
    rebuild(storage)
    for folder in sorted(storage.iterdir()):
        frames = load_frames(StudyStore(folder))
        logs = {}
        for run in run_ends(frames, ()):
            if run.exact:
                logs.setdefault(run.arm, {})[run.seed] = float(np.log(run.high))
        yield logs, frames.plan.baseline


def mlperf(folder: Path, target: float = 3.3) -> list[Study]:
    """Return the same of systems' logs, once for each as the baseline; the seeds number its runs."""
    logs = {}
    for path in sorted(folder.rglob("result_*.txt")):
        run = read_mllog(path, [])
        if run is None:
            continue
        tokens, loss = zip(*run.evals, strict=True)
        if crossing := find_crossing(tokens, loss, target):
            system = logs.setdefault(str(path.parent), {})
            system[len(system)] = float(np.log(crossing[1]))
    return [(logs, baseline) for baseline in logs]


def tally(
    studies: Iterable[Study], n: int, *, paired: bool, moderated: bool, draws: int = 20
) -> tuple[float, float]:
    """Return the share of intervals that hold the other seeds' mean, and their mean width."""
    rng = np.random.default_rng(0)
    method = Method(paired=paired, moderated=moderated)
    held = []
    widths = []
    for logs, baseline in studies:
        seeds = sorted(logs.get(baseline, ()))
        same_seeds = {arm: runs for arm, runs in logs.items() if sorted(runs) == seeds}
        baseline_runs = same_seeds.pop(baseline, {})
        if len(seeds) <= n or not same_seeds:
            continue
        choices = list(itertools.combinations(seeds, n))
        for choice in rng.permutation(len(choices))[:draws]:
            chosen = choices[choice]
            rest = [seed for seed in seeds if seed not in chosen]
            wider = (1 + n / len(rest)) ** 0.5
            sides = {}
            for arm, runs in same_seeds.items():
                arm_side = [(seed, runs[seed]) for seed in chosen]
                baseline_side = [(seed, baseline_runs[seed]) for seed in chosen]
                sides[arm] = (arm_side, baseline_side)
            for arm, contrast in contrasts(sides, method).items():
                interval = t_interval(contrast.estimate)
                if interval.low is None:
                    continue
                gaps = [same_seeds[arm][seed] - baseline_runs[seed] for seed in rest]
                half = (interval.high - interval.low) / 2
                error = abs(contrast.estimate.value - np.mean(gaps))
                held.append(error <= wider * half)
                widths.append(2 * half)
    return float(np.mean(held)), float(np.mean(widths))


def tally_effects(storage: Path, n: int) -> tuple[float, float]:
    """Return the same two of the average effects of factors, over every choice of ``n`` seeds."""
    held = []
    widths = []
    for folder in sorted(storage.iterdir()):
        analysis = analyse(load_frames(StudyStore(folder)))
        logs = {arm.name: log_tokens_by_seed(arm) for arm in analysis.arms}
        for pool in pair_pools(analysis, logs):
            seeds_by_level = [set(Design(pairs, logs).seeds) for pairs in pool.values()]
            seeds = set.intersection(*seeds_by_level)
            for chosen in itertools.combinations(sorted(seeds), n):
                rest = seeds - set(chosen)
                if not rest:
                    continue
                wider = (1 + n / len(rest)) ** 0.5
                intervals = averages(
                    designs(pool, logs, set(chosen)), Method(paired=True)
                )
                truths = designs(pool, logs, rest)
                for level, interval in intervals.items():
                    low, middle, high = np.log1p(
                        [interval.low, interval.estimate, interval.high]
                    )
                    error = abs(middle - truths[level].gaps.mean())
                    held.append(error <= wider * (high - low) / 2)
                    widths.append(high - low)
    return float(np.mean(held)), float(np.mean(widths))


def pair_pools(analysis: Analysis, logs: Logs) -> Iterable[dict[str, list[Pair]]]:
    """Return level → pairs of arms with runs that hit, for each factor over each level that it starts from."""
    pools = {}
    for effect in analysis.effects:
        pairs = [
            (pair.from_arm, pair.to_arm)
            for pair in effect.pairs
            if logs[pair.from_arm] and logs[pair.to_arm]
        ]
        pools.setdefault((effect.factor, effect.over), {})[effect.level] = pairs
    return pools.values()


def designs(
    pool: dict[str, list[Pair]], logs: Logs, seeds: set[int]
) -> dict[str, Design]:
    """Return level → the design of its pairs over these seeds alone."""
    chosen = {}
    for arm, runs in logs.items():
        chosen[arm] = {seed: runs[seed] for seed in seeds & runs.keys()}
    return {level: Design(pairs, chosen) for level, pairs in pool.items()}


def main() -> None:
    print("| runs | seeds | moderated holds | width | own holds | width |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        sources = [("our findings, paired", list(findings(Path(folder))), True)]
        effects = {n: tally_effects(Path(folder), n) for n in (3, 4)}
    if len(sys.argv) > 1:
        sources.append(("MLPerf's logs, unpaired", mlperf(Path(sys.argv[1])), False))
    for name, studies, paired in sources:
        for n in (2, 3, 4):
            cells = []
            for moderated in (True, False):
                held, width = tally(studies, n, paired=paired, moderated=moderated)
                cells += [f"{held:.1%}", f"{100 * width:.1f}"]
            print(f"| {name} | {n} | {' | '.join(cells)} |")
    for n, (held, width) in effects.items():
        print(f"| effects in our findings | {n} | {held:.1%} | {100 * width:.1f} | | |")


if __name__ == "__main__":
    main()
