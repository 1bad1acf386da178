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
    # through their links
    assert {"ablate.backends.protocol", "ablate.reports.words"} < imports.keys()
    # within a function
    assert "ablate.execute.driver" in imports["ablate.workflow.run"]
    graphlib.TopologicalSorter(imports).prepare()  # else it names the circle


def test_the_files_that_the_docs_name_are_there():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    named = {
        name
        for page in pages
        for name in re.findall(
            r"(?<![\w/])(?:ablate|backends|reports|studies|tests|benchmarks|examples)/[\w/]+\.(?:py|json|yaml|txt)",
            page.read_text(encoding="utf-8"),
        )
    }
    assert len(named) > 20
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_the_names_that_the_docs_place_in_a_file_are_there():
    pages = (ROOT / "CONTRIBUTING.md", ROOT / "docs" / "architecture.md")
    text = " ".join(
        " ".join(page.read_text(encoding="utf-8").split()) for page in pages
    )
    placed = re.findall(r"`(\w+)`,? (?:in|of) `([\w/]+\.py)`", text)
    assert len(placed) > 10
    assert [
        pair
        for pair in placed
        if pair[0] not in (ROOT / pair[1]).read_text(encoding="utf-8")
    ] == []
