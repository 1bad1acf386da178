"""Start-up of the command line over bare Python's, measured in turns so that a busy machine hits both alike.

Target: ``ablate --help`` and ``ablate plan quickstart`` within 0.3 s of ``python -c pass``, by the medians.
Run: ``python benchmarks/startup.py [rounds]``; exits with 1 if missed.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time

TARGET_SEC = 0.3
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "ablate --help": ["-m", "ablate", "--help"],
    "ablate plan quickstart": ["-m", "ablate", "plan", "quickstart"],
    "ablate plan quickstart --json": ["-m", "ablate", "plan", "quickstart", "--json"],
    "ablate init --schema": ["-m", "ablate", "init", "--schema"],
}


def _environment(folder: str) -> dict[str, str]:
    environment = {**os.environ, "ABLATE_STORAGE": folder}
    # an installed package has its byte code
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def seconds(arguments: list[str], folder: str) -> float:
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
        cwd=folder,
        env=_environment(folder),
    )
    return time.perf_counter() - start


def main() -> int:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        for arguments in COMMANDS.values():
            seconds(arguments, folder)  # byte-compile, and hash the corpus once
        for _ in range(rounds):
            for name, arguments in COMMANDS.items():
                times[name].append(seconds(arguments, folder))
    bare = statistics.median(times["python -c pass"])
    slowest = 0.0
    for name, values in times.items():
        over = statistics.median(values) - bare
        slowest = max(slowest, over)
        print(
            f"{name:<30} {statistics.median(values):.3f} s  (+{over:.3f} s, best {min(values):.3f} s)"
        )
    print(f"slowest +{slowest:.3f} s over bare Python, target +{TARGET_SEC} s")
    return int(slowest > TARGET_SEC)


if __name__ == "__main__":
    sys.exit(main())
