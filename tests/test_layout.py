"""The layout of the code: no circle of files. Which room may import which, ``lint-imports`` checks."""

import ast
import graphlib
import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "ablate"


def modules(package):
    """Return module name → file, through the links to backends/, reports/ and studies/."""
    found = {}
    for folder, _, names in os.walk(package, followlinks=True):
        for name in names:
            if name.endswith(".py"):
                path = Path(folder, name)
                parts = path.relative_to(package.parent).with_suffix("").parts
                found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(known):
    """Return module → the modules that it imports anywhere, for type checkers and inside functions too."""
    found = {}
    for module, path in known.items():
        names = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module}: relative imports hide where a name comes from"
                names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        # A module imports its own package whenever it is imported itself.
        own = {name for name in names if module.startswith(f"{name}.")} | {module}
        found[module] = (names & known.keys()) - own
    return found


def circle(graph):
    """Return one circle of a graph; [] where there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_files_import_each_other_in_a_circle():
    graph = imports(modules(PACKAGE))
    assert len(graph) > 200
    assert circle(graph) == []


def test_a_circle_is_found(tmp_path):
    package = tmp_path / "pack"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text("from pack.deep import two\n")
    (package / "deep" / "__init__.py").write_text("")
    (package / "deep" / "two.py").write_text("def late():\n    import pack.one\n")
    assert set(circle(imports(modules(package)))) == {"pack.one", "pack.deep.two"}
