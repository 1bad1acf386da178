"""A device's bits and times in one command of a few minutes: a record and a page for ``docs/devices``.

    python -m benchmarks.device cuda [--minutes 8] [--out ablate-proof] [--processes 12]

It needs a plain copy of the folder with torch, Triton, numpy and pydantic; the study at the end needs the
installed package. On a CPU models and study are tiny, and Triton's kernels are interpreted.

Each part has a share of the minutes, and what the parts before it left over. Checks run in processes of their
own, which end with the part's time, so that a check that hangs or crashes takes no other part with it.

How it fails: a failed check is a finding, and the exit code is 1. A part that did not fit is recorded as *not
run: time*, with what it found until then.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ablate.backends.device import chosen_device, triton_fault
from ablate.backends.select import Selection, overall_mode
from ablate.backends.testing import Check, Skip, Told
from ablate.backends.testing.suite import checks
from ablate.base.errors import safe_text, with_type
from ablate.base.files import write_bytes_atomic, write_record
from ablate.check import OUT, run
from ablate.check.record import (
    CheckedPart,
    CheckFinding,
    ProofRecord,
    State,
    detail_of,
    page,
)
from ablate.check.speed import MODELS
from ablate.check.training import RECIPES, config_of
from ablate.execute.environment import code_digest
from ablate.recipes import Recipe, read_recipe
from ablate.train.graphed import proof, why_eager
from ablate.train.group import ONE_DEVICE
from ablate.train.probe import time_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ablate.check import Setup

ROOT = Path(__file__).resolve().parents[1]
GRACE_SEC = 8
"""How long a program may take to end after it was asked to."""
STEPS: dict[str, Recipe] = {
    "bf16": read_recipe("bf16"),
    "mxfp4": read_recipe("mxfp4"),
    "mxfp4 DHT16": read_recipe("amd-fdw-dht16"),
    "mxfp4 SR RHT16": RECIPES["mxfp4"],
    "nvidia-nvfp4": read_recipe("nvidia-nvfp4"),
    "fp8": read_recipe("fp8"),
}
"""The recipes whose steps are timed."""
TINY_STUDY = (
    "seeds=2",
    "target.val_loss=5.0",
    "base.model={width: 32, layers: 1, heads: 1, ffn: 64}",
    "base.training={tokens: 8192, seq_len: 64, batch_size: 8, eval_every_tokens: 2048, eval_tokens: 1024}",
)
"""What the study has instead on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a part works with. ``ends``: when it must end, by ``time.monotonic``."""

    setup: Setup
    ends: float
    processes: int


def conformance(setup: Setup) -> list[Check]:
    """Make the whole suite's checks of each back end that claims the device, those of many policies last."""
    suite = [
        replace(check, backend=name)
        for name, backend in setup.backends.items()
        for check in checks(backend, setup.where)
    ]
    return sorted(suite, key=lambda check: check.kind == "quantised bits")


def steps(setup: Setup) -> Iterator[Check]:
    """Yield checks of the time of a training step; the compiled one last, because compiling takes long."""
    model = "llama 150M" if setup.on_gpu else "llama-tiny"
    for name in STEPS:
        yield Check(of=f"{model}, {name}", run=partial(time_step, setup, model, name))
    if setup.on_gpu:
        compiled = partial(time_step, setup, model, "bf16", compiled=True)
        yield Check(of=f"{model}, bf16, compiled", run=compiled)


def time_step(setup: Setup, model: str, name: str, *, compiled: bool = False) -> Told:
    """Time a training step of 8 × 2,048 tokens, of 8 × 128 on a CPU, with the back ends of ``auto``."""
    seq_len, vocab_size = (2048, 32_000) if setup.on_gpu else (128, 256)
    counted, warmup = (5, 3) if setup.on_gpu else (1, 1)
    config = config_of(
        MODELS[model], STEPS[name], "auto", vocab_size,
        tokens=8 * seq_len, seq_len=seq_len, batch_size=8, compile=compiled,
    )  # fmt: skip
    gc.collect()  # the model of the check before
    try:
        times = time_steps(
            config, device=setup.where, steps=counted, warmup=warmup, repeats=3
        )
    except torch.OutOfMemoryError:
        raise Skip("out of the device's memory") from None
    seconds = statistics.median(times.sec_per_step)
    figures = {
        "step_ms": seconds * 1e3,
        "tokens_per_s": times.tokens_per_step / seconds,
    }
    if times.peak_memory_bytes is not None:
        figures["peak_memory_GB"] = times.peak_memory_bytes / 1e9
    mode = overall_mode(Selection("auto").choices(STEPS[name], setup.device))
    return Told(f"{mode}, {times.launch}, 8 × {seq_len} tokens", figures)


def graphs(setup: Setup) -> Iterator[Check]:
    """Yield checks that graphed steps leave the losses, weights and moments of eager ones."""
    for name in STEPS:
        yield Check(of=name, run=partial(compare_graphed, setup, name))


def compare_graphed(setup: Setup, name: str) -> str:
    """Take steps of ``llama-tiny`` eager and graphed, in two micro-batches of 4 × 128 tokens each."""
    config = config_of(
        MODELS["llama-tiny"], STEPS[name], "auto", 256,
        tokens=8 * 128, seq_len=128, batch_size=8, micro_batch_size=4,
    )  # fmt: skip
    if (reason := why_eager(config, setup.where)) is not None:
        raise Skip(reason)
    (result,) = proof(config, setup.where, ONE_DEVICE)
    assert result["passed"], result["detail"]
    return "equal to the bit"


CHECKS: dict[str, Callable[[Setup], Iterable[Check]]] = {
    "device": run.facts,
    "conformance": conformance,
    "step times": steps,
    "graph against eager": graphs,
}
"""The parts that consist of checks. A process makes a part's checks again, and runs one of them."""


@cache
def setup_here(where: str) -> Setup:
    return run.setup_of(*chosen_device(where))


def run_check(where: str, part: str, number: int, threads: int) -> CheckFinding:
    """Run a check of a part, in a process that serves this part alone."""
    torch.set_num_threads(threads)
    check = list(CHECKS[part](setup_here(where)))[number]
    started = time.monotonic()
    outcome, _ = check.outcome()
    return CheckFinding(
        backend=check.backend,
        check=check.name,
        seconds=time.monotonic() - started,
        **outcome,
    )


def checked(task: Task, part: str, *, alone: bool) -> Iterator[CheckFinding]:
    """Run a part's checks side by side, or one after the other (``alone``), until its time is over.

    Raises:
        TimeoutError: some had no answer by then.
    """
    count = sum(1 for _ in CHECKS[part](task.setup))
    processes = 1 if alone else min(task.processes, count)
    threads = max(1, torch.get_num_threads() // processes)
    answered = 0
    pool = ProcessPoolExecutor(
        processes, mp_context=multiprocessing.get_context("spawn")
    )
    try:
        answers = [
            pool.submit(run_check, task.setup.where, part, number, threads)
            for number in range(count)
        ]
        for answer in as_completed(answers, timeout=task.ends - time.monotonic()):
            yield answer.result()
            answered += 1
    except TimeoutError:
        raise TimeoutError(f"{answered} of {count} checks") from None
    except BrokenProcessPool:
        detail = f"a process ended within one of {count - answered} checks, which are not here"
        yield CheckFinding(check="process", result="failed", detail=detail)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.kill()


def program(task: Task, *command: str, **environment: str) -> str:
    """Run a Python program of this copy until the part's time is over; return what it printed.

    Raises:
        TimeoutError: it took longer.
        RuntimeError: it failed; the message is the last line of its errors, and more is printed.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    with subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    ) as running:  # fmt: skip
        try:
            printed, errors = running.communicate(timeout=task.ends - time.monotonic())
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                running.communicate(timeout=GRACE_SEC)
            raise TimeoutError from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)  # and what it left
    if running.returncode:
        sys.stderr.write(printed[-4000:] + errors[-4000:])
        raise RuntimeError(
            (errors.strip().splitlines() or [f"exit code {running.returncode}"])[-1]
        )
    return printed


def kernels(task: Task, *options: str) -> Iterator[CheckFinding]:
    """Yield what ``kernels.py`` prints, a finding a line."""
    if fault := triton_fault():
        raise Skip(fault)
    options += ("--processes", str(task.processes))
    interpreter = {}
    if not task.setup.on_gpu:
        options += ("--rows", "256", "--columns", "256")
        interpreter = {"TRITON_INTERPRET": "1"}
    for line in program(
        task, "benchmarks/kernels.py", *options, **interpreter
    ).splitlines():
        policy, _, times = line.partition("  ")
        yield CheckFinding(
            check=policy if times else "about",
            result="told",
            detail=times.strip() or line,
        )


def study(task: Task) -> Iterator[CheckFinding]:
    """Run ``device.yaml``, whose runs share the device; yield its time, then each arm's cost."""
    if find_spec("ray") is None:
        raise Skip("needs the installed package: there is no Ray")
    settings = () if task.setup.on_gpu else TINY_STUDY
    options = itertools.chain.from_iterable(("--set", setting) for setting in settings)
    # an ended study may still write
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        started = time.monotonic()
        try:
            program(
                task,
                "-m",
                "ablate",
                "run",
                "benchmarks/device.yaml",
                "--storage",
                folder,
                *options,
            )
        except TimeoutError:
            states = [
                file.read_text("utf-8")
                for file in Path(folder).glob("device/runs/*/status.json")
            ]
            ended = sum('"finished"' in state for state in states)
            raise TimeoutError(f"{ended} runs had finished") from None
        seconds = time.monotonic() - started
        report = json.loads(
            (Path(folder) / "device" / "report" / "report.json").read_text("utf-8")
        )
    arms = report["arms"]
    tokens = sum(arm_run["tokens"] for arm in arms for arm_run in arm["runs"])
    hits = sum(arm["hit"] for arm in arms)
    reached = f"{hits} of {report['runs_planned']} runs reached {report['target']['val_loss']:g} nats a token"
    detail = f"{tokens:,} tokens in {seconds:.0f} s; {reached}"
    yield CheckFinding(check="study", result="told", seconds=seconds, detail=detail)
    for arm in arms:
        text = arm["text"]
        detail = f"tokens to the target {text['tokens_to_target']}, token cost {text['token_cost']}"
        yield CheckFinding(check=arm["name"], result="told", detail=detail)


PARTS: dict[str, tuple[float, Callable[[Task], Iterator[CheckFinding]]]] = {
    "device": (0.03, partial(checked, part="device", alone=True)),
    "conformance": (0.31, partial(checked, part="conformance", alone=False)),
    "quantisers over a copy": (0.06, kernels),
    "host time of a call": (0.03, lambda task: kernels(task, "--host")),
    "step times": (0.17, partial(checked, part="step times", alone=True)),
    "graph against eager": (
        0.04,
        partial(checked, part="graph against eager", alone=True),
    ),
    "study": (0.34, study),
}
"""The parts in their order, each with its share of the time; the rest is for programs that end late."""


def part_of(
    name: str, findings: Callable[[Task], Iterator[CheckFinding]], task: Task
) -> CheckedPart:
    """Run a part until its time is over; print each finding when it comes."""
    done_findings: list[CheckFinding] = []
    state: State = "passed"
    why = None
    try:
        if time.monotonic() >= task.ends:
            raise TimeoutError  # noqa: TRY301  as a part does that has begun
        for finding in findings(task):
            done_findings.append(finding)
            check = (
                f"{finding.check} ({finding.backend})"
                if finding.backend
                else finding.check
            )
            print(
                safe_text(f"{finding.result:<7} {name}: {check}: {detail_of(finding)}"),
                flush=True,
            )
    except TimeoutError as reason:
        state, why = "not run", ": ".join(filter(None, ("time", str(reason))))
    except Skip as reason:
        state, why = "skipped", str(reason)
    except Exception as error:  # a program that failed: the other parts still run
        done_findings.append(
            CheckFinding(check="program", result="failed", detail=with_type(error))
        )
    results = {finding.result for finding in done_findings}
    if "failed" in results:
        state = "failed"
    elif results == {"skipped"} and state == "passed":
        state, why = "skipped", done_findings[0].detail
    print(f"{state}: {name}{f' ({why})' if why else ''}", flush=True)
    return CheckedPart(name=name, state=state, why=why, findings=tuple(done_findings))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "device", nargs="?", help="cpu or cuda; default: the first GPU, else the CPU"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="default: 8")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(OUT),
        help=f"folder of the record; default: {OUT}",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=min(16, os.cpu_count() or 1),
        help="default: %(default)s",
    )
    args = parser.parse_args()
    ends, parts = time.monotonic(), []
    setup = run.setup_of(*chosen_device(args.device))
    machine = run.machine_of(setup)
    path = args.out / f"{machine.file_name}-benchmark.json"
    for name, (share, findings) in PARTS.items():
        ends += share * args.minutes * 60
        parts.append(
            part_of(
                name, findings, Task(setup=setup, ends=ends, processes=args.processes)
            )
        )
        record = ProofRecord(
            command="benchmarks/device.py", machine=machine, code=code_digest("check"),
            measured_unix=time.time(), parts=tuple(parts),
        )  # fmt: skip
        write_record(path, asdict(record))
        write_bytes_atomic(path.with_suffix(".md"), page(record).encode())
    print(f"{record}. Record: {path}, with a page in Markdown.")
    return int(any(part.state == "failed" for part in parts))


if __name__ == "__main__":
    sys.exit(main())
