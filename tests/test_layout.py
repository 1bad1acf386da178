"""The layout of the code: no circle of files. Which room may import which, ``lint-imports`` checks."""

import graphlib

import grimp


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
