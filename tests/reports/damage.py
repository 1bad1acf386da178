"""Damage to a file of a store: a value in another's place, bytes lost, added or flipped."""

import json

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
