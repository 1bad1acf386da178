"""The names that users import from `ablate.numerics`."""

import importlib
import pkgutil
from inspect import ismodule

from ablate import numerics


def test_no_module_takes_the_place_of_a_public_name():
    for module in pkgutil.iter_modules(numerics.__path__):
        importlib.import_module(f"ablate.numerics.{module.name}")
    assert [name for name in numerics.__all__ if ismodule(getattr(numerics, name))] == []
