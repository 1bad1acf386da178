"""A plain copy of the folder on an image that has torch, triton, numpy and pydantic alone."""

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def with_needs(names):
    """Return distributions by name: these that are installed, and what they need; Triton only if it is named.

    CUDA builds of torch require Triton, and work without it.
    """
    found, waiting = {}, list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # a need of another platform
            continue
        for need in found[name].requires or ():
            needed = re.match(r"[\w.-]+", need).group()
            if "extra ==" not in need and needed != "triton":
                waiting.append(needed)
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Return how to run Python in a plain copy, on an image with these packages alone."""
    copy = tmp_path_factory.mktemp("copy")
    for folder in ("ablate", "backends", "benchmarks", "reports", "studies"):
        shutil.copytree(REPOSITORY / folder, copy / folder, symlinks=True)

    @cache
    def image(*names):
        folder = tmp_path_factory.mktemp("image")
        for package in with_needs(names).values():
            for top in {file.parts[0] for file in package.files}:
                if top not in ("..", "__pycache__") and not (folder / top).exists():
                    (folder / top).symlink_to(package.locate_file(top))
        return folder

    def run(*arguments, packages=("torch", "triton", "numpy", "pydantic")):
        return subprocess.run(
            [sys.executable, "-S", *arguments],
            cwd=copy,
            capture_output=True,
            text=True,
            check=False,
            env={
                "PATH": os.environ["PATH"],
                "HOME": os.environ["HOME"],
                "PYTHONPATH": str(image(*packages)),
                "OMP_NUM_THREADS": "1",
            },
        )

    return run


@pytest.mark.exhaustive
def test_a_bare_image_leaves_a_record(bare, tmp_path):
    """With no time for any part by the command, then some parts of it by the function behind it."""
    door = ("-m", "ablate.check", "cpu", "--out", str(tmp_path), "--json", "--minutes")
    done = bare(*door, "1e-9")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert {part["why"] for part in json.loads(done.stdout)["parts"]} == {"time"}
    code = (
        "import sys; from ablate.check import run; from ablate.check.__main__ import main\n"
        "run.PARTS = {name: run.PARTS[name] for name in ('device', 'exact probe')}\n"
        "sys.exit(main('cpu', 10.0, sys.argv[1], as_json=True))"
    )
    done = bare("-c", code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert {part["state"] for part in json.loads(done.stdout)["parts"]} == {"passed"}
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md"}
    text = "".join(path.read_text() for path in tmp_path.iterdir())
    assert os.uname().nodename not in text
    assert str(tmp_path) not in text


MAKE_ALL = """
from ablate.backends.device import device_of
from ablate.check.run import PARTS, setup_of
setup = setup_of("cpu", device_of("cpu"))
print(*(f"{name}: {sum(1 for _ in tasks(setup))}" for name, tasks in PARTS.items()), sep="\\n")
print(setup.refused["triton"])
"""


@pytest.mark.parametrize(
    ("packages", "triton"),
    [
        (("triton",), "needs a GPU"),
        ((), "Triton is not installed (pip install triton)"),
    ],
)
def test_every_part_can_be_made_there(bare, packages, triton):
    done = bare("-c", MAKE_ALL, packages=("torch", "numpy", "pydantic", *packages))
    assert done.returncode == 0, done.stderr
    *parts, last = done.stdout.splitlines()
    assert len(parts) >= 8
    assert all(re.fullmatch(r".+: [1-9]\d*", line) for line in parts), done.stdout
    assert last == triton


def test_the_benchmark_of_a_device_starts_there(bare, tmp_path):
    options = ("cpu", "--minutes", "1e-9", "--out", str(tmp_path))
    done = bare("-m", "benchmarks.device", *options)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.json")
    parts = json.loads(path.read_text())["parts"]
    assert [part["why"] for part in parts] == ["time"] * 7


def test_a_bad_option_is_one_line(bare):
    done = bare("-m", "ablate.check", "cpu", "--out", "/dev/null/there")
    assert done.returncode == 2
    assert done.stderr.startswith("--out: cannot write /dev/null/there: ")
    assert done.stderr.count("\n") == 1
