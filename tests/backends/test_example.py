"""The example of a package that brings back ends: found by its entry points, and its own tests pass."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "library_backends"


def installed(folder):
    """Lay the example's metadata out as pip would; return the path that finds it and its module."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    info = folder / "ablate_library_backends-0.1.0.dist-info"
    info.mkdir()
    about = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(about)
    places = project["entry-points"]["ablate.backends"]
    lines = [f"{name} = {place}" for name, place in places.items()]
    (info / "entry_points.txt").write_text(
        "\n".join(["[ablate.backends]", *lines]) + "\n"
    )
    return os.pathsep.join(map(str, (folder, EXAMPLE, Path(__file__).parents[2])))


@pytest.mark.exhaustive
def test_its_back_ends_are_found_by_their_entry_points_and_its_tests_pass(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLE / "tests")],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": installed(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout
