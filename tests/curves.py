"""Train in a test: rows without their speed, a request to stop, checkpoints in memory."""

import copy
import itertools
from dataclasses import replace

from ablate.run.config import Fork
from ablate.train import train


def curve(config, tokens, **options):
    """Train a run; return its result and its rows."""
    rows = []
    result = train(config, rows.append, tokens=tokens, **options)
    return result, [
        {name: value for name, value in row.items() if name != "tokens_per_sec"}
        for row in rows
    ]


def losses(rows):
    return [row["val_loss"] for row in rows if row["kind"] == "eval"]


def after(steps):
    """Ask a run to stop after so many steps."""
    asked = itertools.count(1)
    return lambda: next(asked) == steps


def forked(child, parent, tokens):
    """Let a run fork from another after so many tokens."""
    fork = Fork(tokens=tokens, recipe=parent.recipe, training=parent.training)
    return replace(child, fork=fork)


class Kept:
    """Keeps snapshots by step: at a stop, and after each of ``at`` tokens; begins with ``last``."""

    def __init__(self, at=(), last=None):
        self.at, self.last, self.after = at, last, {}

    def load(self):
        return self.last

    def due(self, tokens):
        self.asked = tokens
        return tokens in self.at

    def save(self, snapshot):
        self.last = self.after[snapshot.step] = copy.deepcopy(snapshot)
