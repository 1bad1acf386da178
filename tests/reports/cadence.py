"""The same runs read at every second, third and fourth evaluation: what the cadence alone does to a cost.

python tests/reports/cadence.py STORAGE/STUDY TARGET        prints a line a rule and cadence, as Markdown

Each cadence is read from each of its starts, as if the evaluations had fallen there.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from ablate.reports import analyse, load_frames
from ablate.reports.words import format as words
from ablate.store import StudyStore
from ablate.store.plan_file import Target


def thinned_costs(frames, target, rule, every):
    """Yield (token cost of the second arm, evaluation interval as a share), for each start of the cadence."""
    place = frames.evals.groupby("run_id").cumcount()
    plan = replace(frames.plan, target=Target(kind="val_loss", value=target, crossing=rule))
    for start in range(every):
        evals = frames.evals[place % every == start].reset_index(drop=True)
        analysis = analyse(replace(frames, evals=evals, plan=plan))
        yield analysis.others[0].token_cost, analysis.resolution.share_of_tokens_to_target or 0.0


def main():
    frames, target = load_frames(StudyStore(Path(sys.argv[1]))), float(sys.argv[2])
    for rule in ("confirmed", "first_eval"):
        for every in (1, 2, 3, 4):
            found = list(thinned_costs(frames, target, rule, every))
            costs = "; ".join(words.cost(cost).replace("\u00a0", " ") for cost, _ in found)
            print(f"| {rule} | {every} | {max(share for _, share in found):.0%} | {costs} |")


if __name__ == "__main__":
    main()
