"""Functions that a study names: ``package.module:function``, or ``path/to/file.py:function``.

The function's file is found and hashed without running it. Python does import the packages above a dotted
name. The digest covers this one file: code that it imports can change a result without changing the run's id.

How it fails: ``UserError`` for a malformed name, a missing module or file, or a missing function.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import symtable
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate.base.errors import UserError, with_type

if TYPE_CHECKING:
    from collections.abc import Callable

_FORMS = "package.module:function, or path/to/file.py:function"


def is_file(reference: str) -> bool:
    """Whether a reference names a file, not a module."""
    return reference.partition(":")[0].endswith(".py")


def code_digest(reference: str) -> str:
    """Return the SHA-256 of the file that defines a function, without running it.

    Raises:
        UserError: the file, module or function does not exist, or the file is not Python.
    """
    path, name = _locate(reference)
    try:
        source = path.read_bytes()
        # Bytes say their own encoding.
        symbols = symtable.symtable(source, str(path), "exec").get_symbols()  # type: ignore[arg-type]
    except OSError as error:
        raise UserError(
            f"{reference}: cannot read: {error.strerror or error}",
            hint="check the file",
        ) from None
    except (SyntaxError, ValueError) as error:
        raise UserError(
            f"is not Python: {getattr(error, 'msg', error)}",
            file=path,
            line=getattr(error, "lineno", None),
        ) from None
    defined = {
        symbol.get_name()
        for symbol in symbols
        if symbol.is_assigned() or symbol.is_imported()
    }
    if name not in defined and b"import *" not in source:
        raise UserError(
            f"{reference}: {path.name} defines no '{name}'", hint=f"expected {_FORMS}"
        )
    return hashlib.sha256(source).hexdigest()


def load_function(reference: str) -> Callable[..., Any]:
    """Import the module or file and return the function.

    Raises:
        UserError: the import fails, or the function does not exist.
    """
    path, name = _locate(reference)
    try:
        if is_file(reference):
            module_name = (
                f"_ablate_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
            )
            spec = importlib.util.spec_from_file_location(module_name, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[module_name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(reference.partition(":")[0])
    except Exception as error:  # the user's own code may raise anything
        raise UserError(
            f"{reference} cannot be imported: {with_type(error)}",
            hint="run it with python first",
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(
            f"{reference}: no function '{name}' there", hint=f"expected {_FORMS}"
        )
    return function  # type: ignore[no-any-return]


def _locate(reference: str) -> tuple[Path, str]:
    place, colon, name = reference.partition(":")
    if not (colon and place and name.isidentifier()):
        raise UserError(f"'{reference}' names no function", hint=f"expected {_FORMS}")
    if is_file(reference):
        path = Path(place)
        if not path.is_file():
            raise UserError(
                f"{reference}: no such file",
                hint="relative paths start at the study file",
            )
        return path, name
    try:
        spec = importlib.util.find_spec(place)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        raise UserError(
            f"{reference}: no module '{place}' in this Python",
            hint="install it beside ablate, or name its file: path/to/file.py:function",
        )
    return Path(spec.origin), name
