"""The files of ``benchmarks/``, which is no package."""

import importlib.util
import sys
from pathlib import Path


def load_benchmark(name):
    spec = importlib.util.spec_from_file_location(
        name, Path(__file__).parents[1] / "benchmarks" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its data classes look themselves up
    spec.loader.exec_module(module)
    return module
