"""A search → ``search.html``, ``.md``, ``.json``, its figures, ``confirm.yaml`` where it found anything."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ablate._version import __version__
from ablate.explore.search import short_tokens
from ablate.reports.figures.search import draw_front, draw_importances
from ablate.reports.render import escape_markdown, inline_svg, page_environment
from ablate.reports.search import (
    front_table,
    importance_table,
    search_document,
    sentences,
    trials_table,
)
from ablate.reports.tables import Table
from ablate.store.files import write_bytes_atomic

if TYPE_CHECKING:
    from pathlib import Path

    from ablate.reports.search import Found

CONFIRM = "confirm.yaml"


def write_search(found: Found, folder: Path, confirm: str | None) -> tuple[Path, ...]:
    """Write a search's pages and figures into a folder, and the study that confirms it; returns the pages."""
    drawings = [one for one in (draw_front(found), draw_importances(found)) if one is not None]
    values = {
        "found": found,
        "sentences": sentences(found),
        "front": front_table(found),
        "importances": importance_table(found),
        "trials": [
            (f"{short_tokens(rung.tokens)} tokens", trials_table(found, rung)) for rung in found.rungs
        ],
        "dropped": Table(
            caption="Cells of the grid and arms that are no candidates.",
            columns=("Name", "Why"),
            rows=found.dropped,
        ),
        "drawings": {one.name: one for one in drawings},
        "confirm": None if confirm is None else str(folder / CONFIRM),
        "version": __version__,
    }
    html = page_environment(autoescape=True).get_template("search.html.j2")
    plain = page_environment(autoescape=False)
    plain.filters["md"] = escape_markdown
    pictures = {one.name: inline_svg(one) for one in drawings}
    document = json.dumps(search_document(found), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    files = {
        "search.json": document.encode(),
        "search.md": plain.get_template("search.md.j2").render(values).encode(),
        "search.html": html.render(values | {"pictures": pictures}).encode(),
    }
    for drawing in drawings:
        write_bytes_atomic(folder / f"{drawing.name}.svg", drawing.svg)
        write_bytes_atomic(folder / f"{drawing.name}.png", drawing.png)
    if confirm is None:
        (folder / CONFIRM).unlink(missing_ok=True)
    else:
        write_bytes_atomic(folder / CONFIRM, confirm.encode())
    for name, body in files.items():
        write_bytes_atomic(folder / name, body)
    return tuple(folder / name for name in files)
