"""What the pages beside a study's report share: NAME → ``NAME.html``, ``.md``, ``.json`` and the figures.

How it fails: a folder that cannot be written raises ``OSError``; each file is written whole or not at all.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ablate._version import __version__
from ablate.base.files import write_bytes_atomic
from ablate.reports.pages.render import escape_markdown, inline_svg, page_environment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ablate.reports.figures.canvas import Drawing


def write_pages(
    folder: Path,
    name: str,
    values: Mapping[str, Any],
    *,
    document: Mapping[str, Any],
    drawings: Sequence[Drawing],
) -> tuple[Path, ...]:
    """Write pages of the templates of that name, and the drawings; returns the pages.

    The templates see ``values``, the ``drawings`` by name, and the HTML one their ``pictures`` as inline SVG.
    """
    shared = {"drawings": {one.name: one for one in drawings}, "version": __version__} | dict(values)
    html = page_environment(autoescape=True)
    plain = page_environment(autoescape=False)
    plain.filters["md"] = escape_markdown
    pictures = {one.name: inline_svg(one) for one in drawings}
    text = json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    files = {
        f"{name}.json": text,
        f"{name}.md": plain.get_template(f"{name}.md.j2").render(shared),
        f"{name}.html": html.get_template(f"{name}.html.j2").render(shared | {"pictures": pictures}),
    }
    for one in drawings:
        write_bytes_atomic(folder / f"{one.name}.svg", one.svg)
        write_bytes_atomic(folder / f"{one.name}.png", one.png)
    for file, body in files.items():
        write_bytes_atomic(folder / file, body.encode())
    return tuple(folder / file for file in files)
