"""Finding the file of a study: by its path, or by the name of a study shipped with the package."""

from __future__ import annotations

from pathlib import Path

from ablate.base.errors import Problem, UserError
from ablate.study.faults import did_you_mean


def shipped_studies() -> dict[str, Path]:
    """Return the studies shipped with the package, by name: starters first, then findings."""
    from importlib.resources import files

    folder = Path(str(files("ablate.studies")))
    paths = [*sorted(folder.glob("*.yaml")), *sorted(folder.glob("findings/*.yaml"))]
    return {path.stem: path for path in paths}


def find_file(path_or_name: str | Path) -> Path:
    """Return a study's file. Raises ``UserError`` with the likely name if there is no such file."""
    path = Path(path_or_name)
    is_name = isinstance(path_or_name, str) and path.name == path_or_name and not path.suffix
    try:
        if path.is_file() or path.is_fifo():
            return path
        is_folder = path.is_dir()
    except (OSError, ValueError) as error:  # the name is too long, or has a NUL in it
        raise UserError(f"cannot read the study {str(path_or_name)[:40]!r}: {error}") from None
    shipped = shipped_studies()
    if is_name and path.name in shipped:
        return shipped[path.name]
    if is_folder:
        raise UserError(Problem(file=str(path), what="a folder, not a study file"))
    starters = [name for name, where in shipped.items() if where.parent.name != "findings"]
    close = did_you_mean(path.stem, starters) or f"shipped studies: {', '.join(starters)}"
    what = "no such file, and no shipped study of that name" if is_name else "no such file"
    raise UserError(Problem(file=str(path), what=what, hint=close))
