"""A run store from elsewhere, damaged or hostile, gives a report or one line; never a traceback."""

from __future__ import annotations

import json
import random

import pytest
from damage import damage, replace_somewhere
from synthetic_study import NATIVE, lines, reseal, speed_of, write_throughput

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


def seal(changed, records, draw):
    """Change records as if somebody had written them so: no hash tells that anything is odd."""
    for path in changed & records.keys():
        odd = replace_somewhere(records[path], draw)
        path.write_bytes(record_text(odd if isinstance(odd, dict) else {"odd": odd}))
    for path in changed:
        run = RunDir(path.parent)
        if path.parent.parent.name == "runs" and run.status_path not in changed:
            reseal(run)


def document(store):
    frames = load_frames(store)
    analysis = analyse(frames)
    verdict = write_verdict(analysis)
    cautions = warnings(analysis, frames.faults)
    return report_document(analysis, verdict, [*notices(analysis)], cautions, ())


@pytest.mark.parametrize(("part", "turns"), PARTS)
def test_no_store_makes_a_traceback(make_study, part, turns):
    draw = random.Random(part)
    store = make_study(
        lines("fp8: 3 2.4 2, 3 2.3 2; fp4: 3 2.6 2.1, 3 2.5 2.4"),
        factors={"fp8": {"a": 1}, "fp4": {"a": 2}},
        environment=NATIVE,
    )
    write_throughput(store, speed_of(store, "fp8"), speed_of(store, "fp4"))
    files = (path for path in store.path.rglob("*") if path.is_file())
    whole = {path: content for path in files if (content := path.read_bytes())}
    paths = sorted(whole)
    records = {path: read_record(path) for path in paths if path.suffix == ".json"}
    refusals = []
    for _ in range(turns):
        changed = {draw.choice(paths) for _ in range(draw.randint(1, 2))}
        for path in changed:
            path.write_bytes(damage(whole[path], draw))
        if draw.random() < 0.8:
            seal(changed, records, draw)
        try:
            json.dumps(document(store), allow_nan=False)
        except UserError as error:
            refusals.append(safe_text(str(error)))
        for path in paths:
            path.write_bytes(whole[path])
    assert turns / 75 < len(refusals) < turns - turns / 75
    assert not [text for text in refusals if "\n" in text or "\x1b" in text]
