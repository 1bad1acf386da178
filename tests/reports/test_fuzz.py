"""A run store from elsewhere, damaged or hostile, gives a report or one line; never a traceback."""

from __future__ import annotations

import json
import random

import pytest
from synthetic_study import line

from ablate.errors import UserError, safe_text
from ablate.reports import analyse, load_frames
from ablate.reports.caveats import notices, warnings
from ablate.reports.document import build_document
from ablate.reports.verdict import write_verdict

ODD = [
    None, True, -1, 0, 1e308, 10**400, "", "x" * 50, "../../etc/passwd", "\x1b[31m", "<script>", [], {}, [1],
    {"a": 1}, "NaN", float("1e-320"), -0.0, "é\u202e", 2**63, "finished", "running",
]  # fmt: skip


def replace_somewhere(value, draw):
    """Return a JSON value with one part of it put in another's place, taken away, or doubled."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(list(value))
        if draw.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: replace_somewhere(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.8:
        i = draw.randrange(len(value))
        if draw.random() < 0.15:
            return value[:i] + value[i + 1 :] * draw.choice([1, 2])
        return [*value[:i], replace_somewhere(value[i], draw), *value[i + 1 :]]
    return draw.choice(ODD)


def damage(content, draw):
    kind = draw.random()
    if kind < 0.55:
        lines = content.decode("utf-8", errors="replace").splitlines()
        if len(lines) > 1 and all(text.startswith("{") for text in lines):  # rows
            i = draw.randrange(len(lines))
            lines[i] = json.dumps(replace_somewhere(json.loads(lines[i]), draw))
            return ("\n".join(lines) + "\n").encode()
        return json.dumps(replace_somewhere(json.loads(content), draw)).encode()
    damaged = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(damaged) + 1)
        if kind < 0.7:
            del damaged[at : at + draw.randint(1, 40)]
        elif kind < 0.85:
            damaged[at:at] = draw.randbytes(draw.randint(1, 8))
        elif at < len(damaged):
            damaged[at] ^= 1 << draw.randrange(8)
    return bytes(damaged)


@pytest.mark.parametrize("part", range(4))
def test_no_store_makes_a_traceback(make_study, part):
    draw = random.Random(part)
    store = make_study(
        {"bf16": [line(3, 2.4, 2), line(3, 2.3, 2)], "fp4": [line(3, 2.6, 2.1), line(3, 2.5, 2.4)]},
        factors={"bf16": {"a": 1}, "fp4": {"a": 2}},
    )
    whole = {
        path: path.read_bytes() for path in store.path.rglob("*") if path.is_file() and path.stat().st_size
    }
    paths = sorted(whole)
    outcomes, lines = {"report": 0, "line": 0}, []
    for _ in range(1500):
        changed = {draw.choice(paths) for _ in range(draw.randint(1, 2))}
        for path in changed:
            path.write_bytes(damage(whole[path], draw))
        try:
            frames = load_frames(store)
            analysis = analyse(frames)
            document = build_document(
                analysis, write_verdict(analysis), notices(analysis), warnings(analysis, frames.faults)
            )
            json.dumps(document, allow_nan=False)
            outcomes["report"] += 1
        except UserError as error:
            outcomes["line"] += 1
            lines.append(str(error))
        finally:
            for path in changed:
                path.write_bytes(whole[path])
    assert min(outcomes.values()) > 20
    assert not [line for line in lines if "\n" in safe_text(line) or "\x1b" in safe_text(line)]
