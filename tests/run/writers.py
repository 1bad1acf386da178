"""Logs as trainers write them, from a curve (``writers.txt``), and how files are packed."""

import gzip
import json
from functools import partial
from pathlib import Path

BLANKS = ("", "nan", "NaN", "None", "NA", "N/A", "-", "null")
_, *_BLOCKS = (
    Path(__file__)
    .with_suffix(".txt")
    .read_text()
    .replace("\\x1b", "\x1b")
    .split("\n=== ")
)
LINES = {
    name: lines.splitlines()
    for name, lines in (block.strip("\n").split("\n", 1) for block in _BLOCKS)
}
_SHOWN = {"nemo": ("", " | val_loss: {:.4f}"), "litgpt": ("n/a", "{:.4f}")}


def rows_of(curve, every, since=0):
    """Yield (step, training loss, evaluation or None) for each logged step after ``since``."""
    last = max(curve)
    for step in range(since + every, last + 1, every):
        yield step, 9 - step / (2 * last), curve.get(step)


def trainer(name, curve, every, since=0):
    shown, template = _SHOWN.get(name, ("", ""))
    for step, loss, value in rows_of(curve, every, since):
        if value is not None:
            shown = template.format(value)
        for line in LINES[name]:
            if value is not None or "{value" not in line:
                yield line.format(
                    step=step, last=max(curve), samples=8 * step, tokens=4096 * step, loss=loss, value=value,
                    shown=shown,
                )  # fmt: skip


def hf(curve, every):
    history = []
    for step, loss, value in rows_of(curve, every):
        history.append(
            {"epoch": 0.1, "loss": loss, "learning_rate": 3e-4, "step": step}
        )
        if value is not None:
            history.append(
                {"epoch": 0.1, "eval_loss": value, "eval_runtime": 1.2, "step": step}
            )
    yield json.dumps({"best_metric": None, "log_history": history}, indent=2)


def lightning(curve, every):
    yield "epoch,step,train_loss,val_loss"
    for step, loss, value in rows_of(curve, every):
        yield f"0,{step},{loss:.4f},"
        if value is not None:
            yield f"0,{step},,{value:.4f}"


def csv(curve, every, blank=""):
    yield "step,train_loss,val_loss"
    for step, loss, value in rows_of(curve, every):
        yield f"{step},{loss:.4f},{blank if value is None else f'{value:.4f}'}"


WRITERS = {name: partial(trainer, name) for name in LINES} | {
    "hf": hf,
    "lightning": lightning,
}


def packed(lines, how):
    """The bytes of a file of these lines. ``how``: plain, crlf, utf-16, mark or gzip."""
    text = "\n".join(lines) + "\n"
    if how == "crlf":
        return text.replace("\n", "\r\n").encode()
    if how == "gzip":
        return gzip.compress(text.encode())
    return text.encode({"utf-16": "utf-16", "mark": "utf-8-sig"}.get(how, "utf-8"))
