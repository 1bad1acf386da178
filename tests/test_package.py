"""The package as others install it: what the wheel holds, and that README and CI say the same."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.waiting import run_python

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.mark.exhaustive
def test_the_wheel_holds_all_under_one_name_and_works_without_the_checkout(tmp_path):
    words = f"-m pip wheel --quiet --no-deps --wheel-dir {tmp_path} {REPOSITORY}"
    command = [sys.executable, *words.split()]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("ablate_fp4-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"ablate"}
    for needed in (
        "backends/kernel/kernel.cpp",
        "studies/quickstart.yaml",
        "studies/findings/findings-ladder.yaml",
        "reports/pages/templates/report.html.j2",
        "py.typed",
    ):
        assert f"ablate/{needed}" in names
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = "import ablate.backends, ablate.reports; print(ablate.__file__); import ablate.cli; ablate.cli.main()"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "COLUMNS": "100"}
    done = run_python(
        code, "plan", "quickstart", cwd=tmp_path, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stdout.splitlines()[0]
    assert "all three + dht16" in done.stdout


def test_ci_runs_what_the_readme_says():
    readme = (REPOSITORY / "README.md").read_text()
    ci = (REPOSITORY / ".ci" / "run").read_text()
    marks = {"quickstart": "ablate run quickstart", "tests": "-m pytest"}
    for mark, command in marks.items():
        assert f"$(readme {mark})" in ci
        block = re.search(rf"<!-- {mark} -->\n```bash\n(.*?)```", readme, re.DOTALL)
        assert command in block.group(1)
    tests = block.group(1).splitlines()[-1]
    assert tests in (REPOSITORY / "CONTRIBUTING.md").read_text()
    # What the README's command leaves out runs in a stage of its own.
    assert re.search(rf"^.*{re.escape(tests)} -m exhaustive$", ci, re.MULTILINE)
