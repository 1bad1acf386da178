"""MLPerf's log lines for tests."""

import json

import yaml


def mllog(words):
    """Return a line for each ``KEY=VALUE@WHAT=NUMBER``, the part from @ on being its metadata."""
    lines = []
    for word in words.split():
        key, _, rest = word.partition("=")
        value, _, meta = rest.partition("@")
        what, _, number = meta.partition("=")
        content = {
            "time_ms": 1.7e12,
            "key": key,
            "value": yaml.safe_load(value or "null"),
        }
        content["metadata"] = {what: yaml.safe_load(number)} if what else {}
        lines.append(f":::MLLOG {json.dumps(content)}")
    return lines
