"""Damage to a file: a value in another's place, bytes lost, added or replaced."""

import json

ODD = [
    None, True, -1, 0, 1e308, 10**400, "", "x" * 50, "../../etc/passwd", "\x1b[31m", "<script>", [], {}, [1],
    {"a": 1}, "NaN", float("1e-320"), -0.0, "é\u202e", 2**63, "finished", "running",
]  # fmt: skip

SPLINTERS = [
    *b"|\x00|\xff\xfe|\n|\r|,|\"|'|{|}|null|true|NaN|-Infinity|1e400|-1|0|1e-320|-0.0|0x10|:::MLLOG "
    b'|:::MLLOG {|"metadata": []|"value": {}|"key": 3|samples_count|eval_accuracy|seed|\xe2\x80\xae|\x1b[2J'
    b"|<script>|../../x| - |__MIN|tokens|val_loss|arm|\\|\\ud800|1_0| 12|inf|3.5e2".split(b"|"),
    b"[" * 3000, b"9" * 400, b"9" * 5000,
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


def damaged(content, draw):
    """Put splinters, random bytes, or lines of its own into some places of a file."""
    for _ in range(draw.choice([1, 1, 2, 3])):
        at, splinter = draw.randrange(len(content) + 1), draw.choice(SPLINTERS)
        new = draw.choice(
            [
                splinter,
                splinter,
                draw.randbytes(1),
                draw.choice(content.splitlines(True) or [b""]),
            ]
        )
        content = (
            content[:at] + new + content[at + draw.choice([0, 0, 1, 2, 4, 8, 60]) :]
        )
    return content


def damage(content, draw):
    if draw.random() < 0.55:
        lines = content.decode("utf-8", errors="replace").splitlines()
        if len(lines) > 1 and all(text.startswith("{") for text in lines):  # rows
            i = draw.randrange(len(lines))
            lines[i] = json.dumps(replace_somewhere(json.loads(lines[i]), draw))
            return ("\n".join(lines) + "\n").encode()
        return json.dumps(replace_somewhere(json.loads(content), draw)).encode()
    return damaged(content, draw)
