"""Tell whether the runs of one study are the beginning of another's, arm by arm and seed by seed.

Training losses are logged as means over some steps each, and studies may log at different intervals: compared
are the means between the steps at which both have a row. Two studies of one rate and one order of the data,
of which one goes on for longer, should agree to the last digit::

    python benchmarks/prefix.py --storage DIRECTORY findings-ladder findings-longer
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path

from ablate.store import StudyStore


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--storage", type=Path, required=True, help="the storage of both studies")
    parser.add_argument("studies", nargs=2)
    options = parser.parse_args()
    first, second = (losses(StudyStore(options.storage / name)) for name in options.studies)
    common = sorted(first.keys() & second.keys())
    differences = [abs(a - b) for run in common for a, b in means_between(first[run], second[run])]
    print(
        f"{len(common)} pairs of runs with the same arm and seed, {len(differences)} mean training losses at "
        f"equal steps: {sum(one == 0 for one in differences)} equal, the largest difference "
        f"{max(differences, default=0.0):.3g} nats/token"
    )


def losses(store: StudyStore) -> dict[tuple[str, int], dict[int, float]]:
    """Map each run's (arm, seed) to its logged mean training losses by step."""
    found = {}
    for arm, run in store.plan().runs():
        path = store.run(run.id).metrics_path
        if path.exists():
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            found[arm.name, run.seed] = {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}
    return found


def means_between(left: dict[int, float], right: dict[int, float]) -> list[tuple[float, float]]:
    """Return both runs' mean losses between neighbouring steps that both have logged."""
    common = [0, *sorted(left.keys() & right.keys())]
    return [(mean(left, *ends), mean(right, *ends)) for ends in pairwise(common)]


def mean(rows: dict[int, float], after: int, until: int) -> float:
    steps = [after, *sorted(step for step in rows if after < step <= until)]
    return sum((end - start) * rows[end] for start, end in pairwise(steps)) / (until - after)


if __name__ == "__main__":
    main()
