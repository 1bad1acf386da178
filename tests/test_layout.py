"""The layout: no circle of files; the docs name what is there. ``lint-imports`` checks the rooms."""

import graphlib
import re
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]


def test_no_files_import_each_other_in_a_circle():
    """Also for type checkers and inside functions; importing a module imports its own package anyway."""
    graph = grimp.build_graph("ablate", cache_dir=None)
    imports = {
        module: {
            other
            for other in graph.find_modules_directly_imported_by(module)
            if not module.startswith(f"{other}.")
        }
        for module in graph.modules
    }
    assert {"ablate.backends.protocol", "ablate.reports.words"} < imports.keys()  # through their links
    assert "ablate.execute.driver" in imports["ablate.workflow.run"]  # within a function
    graphlib.TopologicalSorter(imports).prepare()  # else it names the circle


def test_the_scripts_and_tests_that_the_docs_name_are_there():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    named = {
        name
        for page in pages
        for name in re.findall(
            r"\b(?:tests|benchmarks|examples)/[\w/]+\.py", page.read_text(encoding="utf-8")
        )
    }
    assert len(named) > 20
    assert {name for name in named if not (ROOT / name).exists()} == set()
