"""A run store from elsewhere, damaged or hostile, gives a report or one line; never a traceback."""

from __future__ import annotations

import json
import random

import pytest
from damage import damage, replace_somewhere
from synthetic_study import NATIVE, line, reseal, speed_of, write_throughput

from ablate.base.errors import UserError, safe_text
from ablate.base.files import read_record, record_text
from ablate.reports import analyse, load_frames
from ablate.reports.pages.document import report_document
from ablate.reports.words.caveats import notices, warnings
from ablate.reports.words.verdict import write_verdict
from ablate.store import RunDir

PARTS = [
    (0, 150),
    *(pytest.param(part, 750, marks=pytest.mark.exhaustive) for part in range(1, 3)),
]


@pytest.mark.parametrize(("part", "turns"), PARTS)
def test_no_store_makes_a_traceback(make_study, part, turns):
    draw = random.Random(part)
    store = make_study(
        {
            "fp8": [line(3, 2.4, 2), line(3, 2.3, 2)],
            "fp4": [line(3, 2.6, 2.1), line(3, 2.5, 2.4)],
        },
        factors={"fp8": {"a": 1}, "fp4": {"a": 2}},
        environment=NATIVE,
    )
    write_throughput(store, speed_of(store, "fp8"), speed_of(store, "fp4"))
    whole = {
        path: path.read_bytes()
        for path in store.path.rglob("*")
        if path.is_file() and path.stat().st_size
    }
    paths = sorted(whole)
    records = {path: read_record(path) for path in paths if path.suffix == ".json"}
    outcomes, lines = {"report": 0, "line": 0}, []
    for _ in range(turns):
        changed = {draw.choice(paths) for _ in range(draw.randint(1, 2))}
        for path in changed:
            path.write_bytes(damage(whole[path], draw))
        # somebody wrote it so: no hash tells that anything is odd
        if draw.random() < 0.8:
            for path in changed & records.keys():
                odd = replace_somewhere(records[path], draw)
                path.write_bytes(
                    record_text(odd if isinstance(odd, dict) else {"odd": odd})
                )
            for folder in {
                path.parent for path in changed if path.parent.parent.name == "runs"
            }:
                run = RunDir(folder)
                if run.status_path not in changed:
                    reseal(run)
        try:
            frames = load_frames(store)
            analysis = analyse(frames)
            document = report_document(
                analysis,
                write_verdict(analysis),
                [*notices(analysis)],
                warnings(analysis, frames.faults),
                (),
            )
            json.dumps(document, allow_nan=False)
            outcomes["report"] += 1
        except UserError as error:
            outcomes["line"] += 1
            lines.append(str(error))
        finally:
            for path in paths:
                path.write_bytes(whole[path])
    assert min(outcomes.values()) > turns / 75
    assert not [
        line for line in lines if "\n" in safe_text(line) or "\x1b" in safe_text(line)
    ]
