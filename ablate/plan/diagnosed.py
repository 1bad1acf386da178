"""Check that the layers to diagnose exist: the names of all layers are known only after planning.

How it fails: ``UserError`` with the line of each pattern that matches no layer of any arm.
"""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ablate.base.errors import Problem, UserError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ablate.study import Study


def check_layers(study: Study, names: Iterable[str]) -> None:
    """Raise ``UserError`` for patterns of ``diagnostics.layers`` that match no layer."""
    if study.diagnostics is None or isinstance(study.diagnostics.layers, str):
        return
    known = list(dict.fromkeys(names))
    problems = []
    for pattern, (line, column) in zip(study.diagnostics.layers, study.layer_lines, strict=True):
        if any(fnmatchcase(name, pattern) for name in known):
            continue
        likely = difflib.get_close_matches(pattern, known, n=1)
        hint = f"did you mean '{likely[0]}'?" if likely else f"layers: {', '.join(known[:4])}, …"
        what = f"diagnostics.layers: '{pattern}' names no layer of any arm"
        problems.append(Problem(file=str(study.path), line=line, column=column, what=what, hint=hint))
    if problems:
        raise UserError(*problems)
