"""Break the numerics on purpose, one way at a time (``mutants.yaml``), and see that the tests notice.

    python tests/mutants.py [WORDS OF A NAME]

Each mutant is put into a copy of the tree, never into the tree itself. There runs the test that should notice
and, if it passes, all tests of the numerics, the back ends and the trainer until one fails. Ends with exit
code 1 if a mutant survives. Those with ``bf16`` need a CPU that multiplies bf16: elsewhere they are left out.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
TESTS = (
    "tests/numerics", "tests/layers/test_linear.py", "tests/backends/test_conformance.py",
    "tests/backends/test_modelled_sums.py", "tests/backends/test_cpu_kernel.py", "tests/train/test_loop.py",
    "tests/layers/test_apply.py",
)  # fmt: skip
INTERPRETED = "tests/backends/triton/interpreted/test_kernels.py"
MUTANTS: list[dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)


def is_interpreted(mutant: dict[str, Any]) -> bool:
    return bool(mutant["edits"][0]["file"].startswith("backends/triton/"))


def survives(mutant: dict[str, Any], folder: Path) -> tuple[bool, str]:
    """Run the tests on a copy with this mistake; return whether all pass, and the first that failed."""
    for part in ("ablate", "backends", "reports", "studies", "tests"):
        shutil.copytree(ROOT / part, folder / part, symlinks=True)
    for name in ("pyproject.toml", "README.md", "docs"):
        (folder / name).symlink_to(ROOT / name)
    for edit in mutant["edits"]:
        path = folder / edit["file"]
        text = path.read_text(encoding="utf-8")
        if edit["old"] not in text:
            sys.exit(
                f"mutant '{mutant['name']}': {edit['file']} no longer contains {edit['old']!r}"
            )
        path.write_text(text.replace(edit["old"], edit["new"]), encoding="utf-8")
    if mutant["edits"][0]["file"].startswith("backends/kernel/"):
        # the same bits, compiled in half the time
        path = folder / "backends/cpu_build.py"
        path.write_text(
            path.read_text(encoding="utf-8").replace("-O3", "-O1"), encoding="utf-8"
        )
    environment = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    rounds: tuple[tuple[str, ...], ...] = ((mutant["test"],), TESTS)
    if is_interpreted(mutant):
        rounds = ((INTERPRETED, "-k", mutant["test"]),)
        environment |= {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[0] = str(folder)
    for tests in rounds:
        with redirect_stdout(io.StringIO()) as printed:
            code = pytest.main(["-x", "-q", "-m", "", "-p", "no:cacheprovider", *tests])
        output = printed.getvalue()
        if code in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
            sys.exit(
                f"mutant '{mutant['name']}': no test ran ({' '.join(tests)})\n{output[-2000:]}"
            )
        if code:
            failed = [
                line
                for line in output.splitlines()
                if line.startswith(("FAILED", "ERROR"))
            ]
            return False, failed[0].removeprefix("FAILED ") if failed else output[-300:]
    return True, ""


def judge(mutant: dict[str, Any]) -> tuple[bool, str, float]:
    """Return what ``survives`` does, and the seconds that it took."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        lives, by = survives(mutant, Path(folder))
    return lives, by, time.monotonic() - started


def main() -> None:
    # not in the processes of the mutants, which import their own copy
    from ablate.backends import cpu_build

    wanted = " ".join(sys.argv[1:])
    mutants = [mutant for mutant in MUTANTS if wanted in mutant["name"]]
    if not cpu_build.loaded()[0].multiplies:
        for mutant in mutants.copy():
            if mutant.get("bf16"):
                print(
                    f"left out, as this CPU has no products in bf16: {mutant['name']}"
                )
                mutants.remove(mutant)
    alive = []
    os.environ["OMP_NUM_THREADS"] = "1"
    context = get_context("forkserver")
    # once, not once a mutant
    context.set_forkserver_preload(["torch", "numpy", "pytest", "hypothesis"])
    with ProcessPoolExecutor(
        os.cpu_count(), mp_context=context, max_tasks_per_child=1
    ) as pool:
        for number, (mutant, (lives, by, sec)) in enumerate(
            zip(mutants, pool.map(judge, mutants), strict=True), 1
        ):
            alive += [mutant["name"]] if lives else []
            verdict = (
                "SURVIVED" if lives else f"killed by {by.split(' - ')[0].split('[')[0]}"
            )
            print(
                f"{number:3}/{len(mutants)} {mutant['name']}: {verdict} ({sec:.0f} s)",
                flush=True,
            )
    print(f"{len(mutants) - len(alive)} of {len(mutants)} mutants killed")
    sys.exit(f"survivors: {', '.join(alive)}" if alive else 0)


if __name__ == "__main__":
    main()
