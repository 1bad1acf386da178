"""Logs as trainers write them, from a curve: a writer for each format, and how files are packed."""

import gzip
import json

BLANKS = ("", "nan", "NaN", "None", "NA", "N/A", "-", "null")


def rows_of(curve, every, since):
    """Yield (step, training loss, evaluation or None) for each logged step after ``since``."""
    last = max(curve)
    for step in range(since + every, last + 1, every):
        yield step, 9 - step / (2 * last), curve.get(step)


def megatron(curve, every, since=0):
    for step, loss, value in rows_of(curve, every, since):
        yield (
            f" [2026-11-20 10:00:00] iteration {step:8d}/{max(curve):8d} | "
            f"consumed samples: {step * 8:12d} | elapsed time per iteration (ms): 812.3 | "
            "learning rate: 3.000000E-04 | global batch size:     8 | "
            f"lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 1.234 | number of nan iterations:   0 |"
        )
        if value is not None:
            yield f" validation loss at iteration {step} | lm loss value: {value:.6E} | lm loss PPL: 9E+01 | "


def torchtitan(curve, every, since=0):
    for step, loss, value in rows_of(curve, every, since):
        yield (
            f"[rank0]:[titan] INFO - \x1b[31mstep: {step:,}  \x1b[32mloss: {loss:8.5f}  \x1b[33mgrad_norm: "
            "0.8319  \x1b[36mmemory: 9.46GiB(64.99%)  \x1b[34mtps: 7,271\x1b[39m"
        )
        if value is not None:
            yield f"[titan] \x1b[33mvalidate step: {step:,}  \x1b[32mloss: {value:8.4f}\x1b[39m  memory: 9GiB"


def nanogpt(curve, every, since=0):
    for step, loss, value in rows_of(curve, every, since):
        if value is not None:
            yield f"step {step}: train loss {loss:.4f}, val loss {value:.4f}"
        yield f"iter {step}: loss {loss:.4f}, time 334.53ms, mfu 1.11%"


def nanochat(curve, every, since=0):
    for step, loss, value in rows_of(curve, every, since):
        if value is not None:
            yield f"Step {step:05d} | Validation bpb: {value:.6f}"
        yield (
            f"step {step:05d}/{max(curve):05d} (2.50%) | loss: {loss:.6f} | lrm: 1.00 | dt: 123.45ms | "
            "tok/sec: 1,061,234 | mfu: 48.20"
        )


def nemo(curve, every, since=0):
    shown = ""
    for step, loss, value in rows_of(curve, every, since):
        if value is not None:
            shown = f" | val_loss: {value:.4f}"
        yield (
            f"Training epoch 0, iteration {step}/{max(curve)} | lr: 0.0003 | global_batch_size: 8 | "
            f"global_step: {step} | reduced_train_loss: {loss:.3f} | consumed_samples: {step * 8}{shown}"
        )


def litgpt(curve, every, since=0):
    shown = "n/a"
    for step, loss, value in rows_of(curve, every, since):
        if value is not None:
            shown = f"{value:.4f}"
        yield (
            f"Epoch 1 | iter {step * 4} step {step} | loss train: {loss:.3f}, val: {shown} | "
            "iter time: 312.22 ms (step) remaining time: 1 day"
        )


def olmo(curve, every, since=0):
    for step, loss, value in rows_of(curve, every, since):
        yield f"2026-11-20 10:01:39 INFO [step={step:,}/{max(curve):,},epoch=0,eta=1h]"
        yield f"    train/CE loss={loss:.4f}"
        yield f"    throughput/total tokens={step * 4096:,}"
        if value is not None:
            yield f"    eval/web/CE loss={value:.4f}"


def hf(curve, every, since=0):
    history = []
    for step, loss, value in rows_of(curve, every, since):
        history.append({"epoch": 0.1, "loss": loss, "learning_rate": 3e-4, "step": step})
        if value is not None:
            history.append({"epoch": 0.1, "eval_loss": value, "eval_runtime": 1.2, "step": step})
    yield from json.dumps({"best_metric": None, "log_history": history}, indent=2).splitlines()


def lightning(curve, every, since=0):
    yield "epoch,step,train_loss,val_loss"
    for step, loss, value in rows_of(curve, every, since):
        yield f"0,{step},{loss:.4f},"
        if value is not None:
            yield f"0,{step},,{value:.4f}"


def csv(curve, every, blank="", since=0):
    yield "step,train_loss,val_loss"
    for step, loss, value in rows_of(curve, every, since):
        yield f"{step},{loss:.4f},{blank if value is None else f'{value:.4f}'}"


WRITERS = {
    writer.__name__: writer
    for writer in (megatron, torchtitan, nanogpt, nanochat, nemo, litgpt, olmo, hf, lightning)
}
LINES = {name: writer for name, writer in WRITERS.items() if name not in ("hf", "lightning")}
"""Those whose log is lines of text."""


def packed(lines, how):
    """The bytes of a file of these lines. ``how``: plain, crlf, utf-16, mark or gzip."""
    if how == "crlf":
        return "\r\n".join(lines).encode()
    text = "\n".join(lines) + "\n"
    if how == "utf-16":
        return text.encode("utf-16")
    if how == "mark":
        return text.encode("utf-8-sig")
    return gzip.compress(text.encode()) if how == "gzip" else text.encode()
