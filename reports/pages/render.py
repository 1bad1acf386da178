"""Templates, values and drawings → a page as HTML, Markdown and JSON.

The HTML file is complete in itself (pictures as inline SVG, styles, at most one script), and its content
policy forbids the network and every other script. The template escapes every user string; Markdown has its
own escape, because a ``|`` in a name would break the table.

How it fails: a folder that cannot be written raises ``OSError``; each file is written whole or not at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from ablate._version import __version__
from ablate.base.colours import HUES, INK
from ablate.base.errors import safe_text
from ablate.base.files import write_bytes_atomic
from ablate.reports.figures.canvas import (
    CONTEXT,
    FAINT,
    GRID,
    SHADE,
    Drawing,
)
from ablate.reports.findings.compare import target_text
from ablate.reports.words import format as words

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ablate.reports.findings.results import Analysis
    from ablate.reports.words.format import Table

_TEMPLATES = Path(__file__).parent / "templates"

# Colours of the SVG → style variables, for which the page has light and dark values.
_VARIABLES = {
    INK: "ink",
    FAINT: "faint",
    GRID: "grid",
    CONTEXT: "context",
    SHADE: "shade",
    "#ffffff": "paper",
    **{hue: f"hue{i}" for i, hue in enumerate(HUES)},
}


def write_pages(
    folder: Path,
    name: str,
    values: Mapping[str, Any],
    document: Mapping[str, Any],
    parts: Iterable[Table | Drawing | None],
    *,
    template: str = "beside",
    figures: str = "",
) -> tuple[Path, Path, Path]:
    """Write the drawings, then ``NAME.json``, ``.md`` and ``.html``; return these three in that order.

    The templates get ``values`` and the ``parts`` of the page; tables without rows are left out.
    ``figures``: the drawings' subfolder, with a slash. A page with ``live`` in its values has a script, which
    the content policy allows by the hash of its text. The files of parts that only the page before had are
    removed.
    """
    parts = [
        part for part in parts if isinstance(part, Drawing) or (part and part.rows)
    ]
    drawings = [part for part in parts if isinstance(part, Drawing)]
    # The browser hashes the text between the tags, so the file is inserted unchanged.
    script = (_TEMPLATES / "report.js").read_bytes()
    values = {
        "parts": parts,
        "figures": figures,
        "version": __version__,
        "live": None,
        "script": Markup(script.decode()),  # noqa: S704  no user's word is in it
        "script_hash": base64.b64encode(hashlib.sha256(script).digest()).decode(),
        "pictures": {drawing.name: inline_svg(drawing) for drawing in drawings},
        **values,
    }
    markdown = _environment(autoescape=False).get_template(f"{template}.md.j2")
    html = _environment(autoescape=True).get_template(f"{template}.html.j2")
    files = {
        f"{name}.json": json.dumps(
            document, indent=1, allow_nan=False, ensure_ascii=False
        )
        + "\n",
        f"{name}.md": markdown.render(values),
        f"{name}.html": html.render(values),
    }
    page = folder / f"{name}.html"
    old_names = set()
    if page.exists():
        old_names = _names(page.read_text(encoding="utf-8", errors="replace"))
    for drawing in drawings:
        write_bytes_atomic(folder / figures / f"{drawing.name}.svg", drawing.svg)
        write_bytes_atomic(folder / figures / f"{drawing.name}.png", drawing.png)
    for file, text in files.items():
        write_bytes_atomic(folder / file, text.encode())
    for old in old_names - _names(files[page.name]):
        for file in (f"{figures}{old}.svg", f"{figures}{old}.png", f"tables/{old}.tex"):
            (folder / file).unlink(missing_ok=True)
    return folder / f"{name}.json", folder / f"{name}.md", page


def _names(page: str) -> set[str]:
    """Find the names of a page's sections and tables, after which their files are named."""
    return set(re.findall(r'<(?:section id|table data-name)="([\w-]+)"', page))


def definitions(analysis: Analysis) -> list[tuple[str, str]]:
    """Define the terms of a report as (term, meaning in this study)."""
    hits = []
    for arm in analysis.every_arm:
        hits += [run for run in arm.runs if run.exact]
    timed = analysis.throughput
    text = (
        _environment(autoescape=False)
        .get_template("method.txt.j2")
        .render(
            analysis=analysis,
            words=words,
            target=target_text(analysis.plan),
            hits=len(hits),
            fitted=sum(run.fitted is not None for run in hits),
            alone=timed if timed and timed.tokens_per_sec else None,
        )
    )
    lines = []
    for line in filter(str.strip, text.splitlines()):
        term, _, meaning = line.partition(": ")
        lines.append((term, meaning.strip()))
    return lines


def latex(table: Table) -> str:
    """Write a table for LaTeX's ``booktabs`` package, with its caption and label."""
    return (
        _environment(autoescape=False).get_template("table.tex.j2").render(table=table)
    )


def escape_markdown(text: str) -> str:
    """Escape what Markdown, or HTML inside it, would read as markup; a line break becomes a space.

    Characters that do not print become visible.
    """
    flat = (
        safe_text(" ".join(str(text).split()))
        .replace("&", "&amp;")
        .replace("<", "&lt;")
    )
    return re.sub(r"([\\`*_{}\[\]#|~$]|^>)", r"\\\1", flat)


def with_code(text: str) -> Markup:
    """Escape a text for HTML, with what stands between backticks as code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704  escaped before


def _environment(*, autoescape: bool) -> Environment:
    # Markdown is not HTML: there every user string has its own filter, as the tests check.
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=autoescape,  # noqa: S701
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "md": escape_markdown,
        "tex": words.escape_latex,
        "code": with_code,
    }
    return environment


def inline_svg(drawing: Drawing) -> Markup:
    """Make an SVG for the page: with unique ids, the page's colours, and a label."""
    svg = drawing.svg.decode()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    # matplotlib's style element would apply to the whole page.
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{drawing.name}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{drawing.name}-", svg)
    for color, variable in _VARIABLES.items():
        svg = re.sub(f': {color}(?=[;"])', f": var(--{variable})", svg)
    size = re.search(r'viewBox="0 0 ([0-9.]+) [^"]*"', svg)
    assert size is not None  # matplotlib always writes it
    # Letters have the same size in narrow and wide figures.
    width = f"--width: {float(size[1]) * 1.45:.0f}px"
    opening = (
        f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" {size[0]} style="{width}" role="img" '
        f'aria-labelledby="{drawing.name}-title {drawing.name}-caption">'
    )
    return Markup(opening + svg[svg.index(">") + 1 :])  # noqa: S704  matplotlib has escaped the text inside
