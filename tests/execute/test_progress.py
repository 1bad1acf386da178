"""The progress of a study, as ``test_progress.txt`` has it; ``REWRITE=1 pytest`` writes its answers anew."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from ablate.cli.display import end_text, summary
from ablate.execute import progress
from ablate.execute.progress import RunProgress, read_progress, seconds_to_end
from ablate.store import Status
from tests.golden import cases, check


@pytest.mark.parametrize("case", cases(Path(__file__).with_suffix(".txt")))
def test_progress_follows_the_files_of_the_runs(study, monkeypatch, case):
    monkeypatch.setattr(progress, "_TAIL_BYTES", 200)
    store, requests = study
    run = store.run(requests[0].run_id)
    run.create({})
    said = []
    for line in case[1].splitlines()[1:-1]:
        what, _, content = line.partition(" ")
        if what == "status":
            run.write_status(Status(**json.loads(content)))
        elif what == "read":
            runs = read_progress(store, store.plan(), **json.loads(content))
            shown = {
                key: value for key, value in vars(runs[0]).items() if value is not None
            }
            said.append(f"{summary(runs)}: {shown}")
            said.append(
                f"{runs[0].seconds_left} s left, {seconds_to_end(runs)} s to the end of all"
            )
        elif content:
            with (run.path / what).open("a") as file:
                file.write(content.replace("\\n", "\n"))
        else:
            (run.path / what).unlink()
    check(case, said)


def test_the_end_of_a_study_counts_what_runs_beside_what():
    run = partial(RunProgress, run_id="", seed=0, budget=100)
    going = [
        run(arm="a", state="running", tokens=50, pace=1.0),
        run(arm="b", state="running", tokens=50, pace=3.0),
    ]
    pairs = {"b": "pending", "a": "pending", "c": "failed", "d": "stopped"}.items()
    later = [run(arm=arm, state=state) for arm, state in pairs]
    unknown = run(arm="c", state="running")
    ended = run(arm="a", state="finished", tokens=100, pace=1.0)
    assert seconds_to_end(going) == 150
    assert seconds_to_end(going + later) == (50 + 150 + 300 + 100) / 2
    assert seconds_to_end(later) is seconds_to_end([unknown]) is None
    assert seconds_to_end([unknown, ended]) == 100
    now = datetime(2026, 11, 23, 14, 20, tzinfo=UTC)
    assert end_text(later, at_most=False) == ""
    soon = end_text(going, at_most=False, now=now)
    assert soon == "ends about Mon 23 Nov 14:22 (2 min left)"
    late = end_text([replace(going[1], pace=300.0)], at_most=True, now=now)
    assert late == "ends by Mon 23 Nov 18:30 (4.2 h left)"
