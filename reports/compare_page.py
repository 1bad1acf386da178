"""A comparison of two studies → ``compare.html``, ``.md``, ``.json`` and its figure."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ablate._version import __version__
from ablate.reports.compare import compare_document, compare_table
from ablate.reports.figures.compare import draw_comparison
from ablate.reports.render import escape_markdown, inline_svg, page_environment
from ablate.reports.tables import Table
from ablate.store.files import write_bytes_atomic

if TYPE_CHECKING:
    from pathlib import Path

    from ablate.reports.compare import Comparison


def write_comparison(comparison: Comparison, folder: Path) -> tuple[Path, ...]:
    """Write a comparison's pages and figure into a folder; returns the pages."""
    drawing = draw_comparison(comparison)
    values = {
        "comparison": comparison,
        "table_of_arms": compare_table(comparison),
        "differences": Table(
            caption="What the two studies differ in, as their files say it.",
            columns=("Key", comparison.left, comparison.right),
            rows=tuple((key, *pair) for key, pair in comparison.differs.items()),
        ),
        "drawing": drawing,
        "version": __version__,
    }
    html = page_environment(autoescape=True).get_template("compare.html.j2")
    plain = page_environment(autoescape=False)
    plain.filters["md"] = escape_markdown
    document = json.dumps(compare_document(comparison), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    files = {
        "compare.json": document.encode(),
        "compare.md": plain.get_template("compare.md.j2").render(values).encode(),
        "compare.html": html.render(
            values | {"picture": None if drawing is None else inline_svg(drawing)}
        ).encode(),
    }
    pictures = {} if drawing is None else {"compare.svg": drawing.svg, "compare.png": drawing.png}
    for name, body in (pictures | files).items():
        write_bytes_atomic(folder / name, body)
    return tuple(folder / name for name in files)
