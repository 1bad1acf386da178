"""Damage to every file of a finished and of a half-done study: what becomes of the report's numbers.

python benchmarks/damage.py [--damages 5000]        prints how each damage ended, as JSON

Two studies are run for it, with diagnostics and a record of `ablate check steps STUDY`; the second is
killed in the middle with all its processes. Then each file in turn is removed, emptied, cut at a random byte,
or has a bit flipped or a digit changed, its content is put back after the reading, and the report's JSON is
compared with that of the undamaged store.

A record of `ablate check steps STUDY` that is removed was never made, so that kind is left out for it. The
files of the token cache are damaged likewise, and opened as a run opens them. A damage ends in one of these
ways:

same            every number is as before
named           a number is another one, and a warning names the run or file
refused         one line instead of a report
progress        only the rows of a run without a result end earlier than before, at an older checkpoint
silent          a number is another one, and nothing says why
traceback       any error but a line for the user
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate.base.errors import UserError
from ablate.cli.display import summary
from ablate.data import load
from ablate.execute.progress import read_progress
from ablate.reports import analyse, load_frames
from ablate.reports.findings.diagnoses import diagnose_study
from ablate.reports.pages.document import report_document
from ablate.reports.words import caveats
from ablate.reports.words.verdict import write_verdict
from ablate.store import END_STATES, StudyStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STUDY = """\
name: damaged
baseline: bf16
target: {val_loss: 3.5}
seeds: 2
diagnostics: {every_tokens: 32_768}
base:
  model: {width: 64, layers: 1, heads: 2, ffn: 96}
  data: {source: stdlib, tokenizer: bytes, max_bytes: 300_000}
  resources: {checkpoint_every_sec: 0}
  training: {tokens: 131_072, seq_len: 64, batch_size: 16, eval_every_tokens: 8192, eval_tokens: 4096}
arms:
  bf16: {recipe: bf16}
  wgrad: {recipe: {gemms: [wgrad]}}
  all three: {recipe: {gemms: [fprop, dgrad, wgrad], stabiliser: sr+rht}}
"""
KINDS = ("remove", "empty", "cut", "flip", "digit")


def ablate(*words: str, cwd: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "ablate", *words, "--storage", "runs"], cwd=cwd, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def run_study(folder: Path, *, half: bool) -> StudyStore:
    """Run the study; if only the half of it, kill all its processes while a run goes on."""
    folder.mkdir()
    (folder / "damaged.yaml").write_text(STUDY)
    store = StudyStore(folder / "runs" / "damaged")
    process = ablate("run", "damaged.yaml", cwd=folder)
    while half and process.poll() is None:
        states = [path.read_text() for path in store.path.glob("runs/*/status.json")]
        ended = sum('"finished"' in state for state in states)
        begun = list(store.path.glob("runs/*/checkpoints/*.json"))
        if ended >= 3 and len(begun) >= 2:
            os.killpg(process.pid, signal.SIGKILL)
        time.sleep(0.05)
    process.wait()
    if half:
        time.sleep(35)  # Ray's processes end after their driver
        return store
    ablate(
        "check", "steps", "damaged.yaml", "--steps", "2", "--repeats", "1", cwd=folder
    ).wait()
    return store


def report_of(store: StudyStore) -> dict[str, Any]:
    """Return the report's JSON, and read the progress as `ablate status` does."""
    summary(read_progress(store, store.plan(), executor_alive=False))
    frames = load_frames(store)
    analysis = analyse(frames)
    diagnosed, damaged = diagnose_study(store, analysis)
    document = report_document(
        analysis,
        write_verdict(analysis),
        tuple(caveats.notices(analysis)),
        caveats.warnings(analysis, (*frames.faults, *damaged)),
        diagnosed,
    )
    return json.loads(json.dumps(document, allow_nan=False))  # type: ignore[no-any-return]


def damaged(content: bytes, kind: str, draw: random.Random) -> bytes | None:
    """Return what is left of a file, None for nothing at all."""
    if kind in ("remove", "empty"):
        return None if kind == "remove" else b""
    if kind == "cut":
        return content[: draw.randrange(len(content))]
    digits = [i for i, byte in enumerate(content) if byte in b"0123456789"]
    if kind == "digit" and digits:
        position = draw.choice(digits)
        others = b"0123456789".replace(content[position : position + 1], b"")
        new = draw.choice(others)
    else:
        position = draw.randrange(len(content))
        new = content[position] ^ 1 << draw.randrange(8)
    return content[:position] + bytes([new]) + content[position + 1 :]


def without_progress(report: dict[str, Any]) -> dict[str, Any]:
    """Return the report without what it says of runs that have no result."""
    report = json.loads(json.dumps(report))
    for arm in report["arms"]:
        arm["runs"] = [run for run in arm["runs"] if run["state"] in END_STATES]
    return report


def end_of(
    read: Callable[[], dict[str, Any]],
    whole: dict[str, Any],
    path: Path,
    store: StudyStore,
) -> str:
    """Say how a damage to a file ended."""
    try:
        report = read()
    except (UserError, FileNotFoundError) as error:
        # the second: there is no plan, and so no study
        one_line = path.name in str(error) and "\n" not in str(error)
        return "refused" if one_line else "traceback"
    except Exception as error:
        print(path, repr(error), file=sys.stderr)
        return "traceback"
    new = [line for line in report.pop("warnings") if line not in whole["warnings"]]
    before = {key: value for key, value in whole.items() if key != "warnings"}
    if report == before:
        return "same"
    parts = path.relative_to(store.path).parts
    names = {path.name, parts[1]} if parts[0] == "runs" else {path.name}
    if any(name in line for line in new for name in names):
        return "named"
    if without_progress(report) == without_progress(before):
        return "progress"
    return "silent"


def end_of_tokens(folder: Path) -> str:
    """Say how a damage to a file of a token cache ended."""
    try:
        load(folder)
    except UserError as error:
        return "refused" if "\n" not in str(error) else "traceback"
    except Exception as error:
        print(folder, repr(error), file=sys.stderr)
        return "traceback"
    return "silent"


def damage_store(store: StudyStore, damages: int, draw: random.Random) -> Counter[str]:
    """Damage each file of a store in turn, and count how that ended."""
    whole = report_of(store)
    files = []
    for path in sorted(store.path.rglob("*")):
        derived = path.relative_to(store.path).parts[0] in ("report", "mirror")
        if derived or path.suffix == ".log":
            continue
        if path.is_file() and path.stat().st_size:
            files.append(path)
    ends: Counter[str] = Counter()
    for turn in range(damages):
        path = files[turn % len(files)]
        kind = KINDS[turn // len(files) % len(KINDS)]
        if (path, kind) == (store.throughput_path, "remove"):
            continue
        with damage(path, kind, draw):
            end = end_of(lambda: report_of(store), whole, path, store)
        ends[end] += 1
        if end in ("silent", "traceback", "progress"):
            place = path.relative_to(store.path)
            print(end, kind, place, file=sys.stderr, flush=True)
    assert report_of(store) == whole, "the store was not put back as it was"
    return ends


def damage_tokens(tokens: Path, damages: int, draw: random.Random) -> Counter[str]:
    """Damage each file of a token cache in turn, and count how that ended."""
    load(tokens)
    files = sorted(tokens.iterdir())
    ends: Counter[str] = Counter()
    for turn in range(max(len(KINDS) * len(files), damages)):
        kind = KINDS[turn // len(files) % len(KINDS)]
        with damage(files[turn % len(files)], kind, draw):
            ends[end_of_tokens(tokens)] += 1
    return ends


@contextlib.contextmanager
def damage(path: Path, kind: str, draw: random.Random) -> Iterator[None]:
    """Damage a file, and put its content and times back afterwards."""
    content = path.read_bytes()
    times = path.stat()
    remains = damaged(content, kind, draw)
    try:
        if remains is None:
            path.unlink()
        else:
            path.write_bytes(remains)
        yield
    finally:
        path.write_bytes(content)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--damages", type=int, default=5000)
    parser.add_argument(
        "--keep",
        type=Path,
        help="Use the studies of this folder, made by an earlier call.",
    )
    arguments = parser.parse_args()
    draw = random.Random(0)
    started = time.perf_counter()
    ends: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.keep or Path(name)
        folder.mkdir(exist_ok=True)
        for study in ("finished", "half-done"):
            store = StudyStore(folder / study / "runs" / "damaged")
            if not store.plan_path.exists():
                store = run_study(folder / study, half=study == "half-done")
            ends[study] = damage_store(store, arguments.damages // 2, draw)
        (meta,) = (folder / "finished" / "runs" / "tokens").glob("*/meta.json")
        ends["tokens"] = damage_tokens(meta.parent, arguments.damages // 20, draw)
    seconds = round(time.perf_counter() - started)
    print(json.dumps(ends | {"seconds": seconds}))


if __name__ == "__main__":
    main()
