"""Analysis → ``report.html`` and ``report.md``.

The HTML file holds everything inside itself (pictures as inline SVG, styles, no scripts) and forbids itself
the network by its own content policy. Every user string goes through the template's escaping; Markdown has
an escaping of its own, for a ``|`` in a name would break the table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ablate._version import __version__
from ablate.reports.figures.canvas import CONTEXT, FAINT, GRID, HUES, INK, SHADE
from ablate.reports.findings.ends import target_text
from ablate.reports.words import tables, words
from ablate.reports.words.method import definitions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.reports.figures import Drawing
    from ablate.reports.findings.results import Analysis
    from ablate.reports.pages.sections import Section
    from ablate.reports.words.verdict import Verdict

_TEMPLATES = Path(__file__).parent / "templates"

# Colours of the SVG → style variables of the page, which has values for light and dark.
_VARIABLES = {
    INK: "ink",
    FAINT: "faint",
    GRID: "grid",
    CONTEXT: "context",
    SHADE: "shade",
    "#ffffff": "paper",
    **{hue: f"hue{i}" for i, hue in enumerate(HUES)},
}


@dataclass(frozen=True, kw_only=True)
class Content:
    """Everything that a page shows.

    ``refresh_sec``: a browser loads the page again after so long, for a report that is being written anew
    while a study runs.
    """

    analysis: Analysis
    verdict: Verdict
    notices: Sequence[str]
    warnings: Sequence[str]
    sections: Sequence[Section]
    refresh_sec: int | None = None


def render_report(content: Content) -> tuple[str, str]:
    """Return the self-contained HTML page, and Markdown with the figures as links to their files."""
    values = _values(content)
    pictures = {
        one.drawing.name: inline_svg(one.drawing) for one in content.sections if one.drawing is not None
    }
    html, plain = (page_environment(autoescape=escape) for escape in (True, False))
    return (
        html.get_template("report.html.j2").render(values | {"pictures": pictures}),
        plain.get_template("report.md.j2").render(values),
    )


def escape_markdown(text: str) -> str:
    """Escape what Markdown, or HTML inside it, would read as markup; a line break becomes a space."""
    flat = " ".join(str(text).split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_{}\[\]#|~$]|^>)", r"\\\1", flat)


def page_environment(*, autoescape: bool) -> Environment:
    """Return the templates of all pages."""
    # Markdown is not HTML: it has its own filter on every user string (the tests look).
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=autoescape,  # noqa: S701
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["md"] = escape_markdown
    return environment


def _values(content: Content) -> dict[str, Any]:
    analysis = content.analysis
    return {
        **{field.name: getattr(content, field.name) for field in fields(content)},
        "arms": tables.arm_table(analysis),
        "definitions": definitions(analysis),
        "environments": [
            (count, ", ".join(f"{key} {value}" for key, value in environment.items() if value is not None))
            for environment, count in analysis.environments
        ],
        "training": ", ".join(f"{k} {v}" for k, v in analysis.training.items() if v is not None),
        "target": target_text(analysis.target),
        "ended": words.moment(analysis.last_ended_unix),
        "version": __version__,
    }


def inline_svg(drawing: Drawing) -> Markup:
    """Return an SVG that can stand in the page: ids of its own, the page's colours, words for a reader."""
    svg = drawing.svg.decode()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    # matplotlib's style element would speak to the whole page.
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{drawing.name}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{drawing.name}-", svg)
    svg = re.sub(
        r': (#[0-9a-f]{6})(?=[;"])',
        lambda match: f": var(--{_VARIABLES[match[1]]})" if match[1] in _VARIABLES else match[0],
        svg,
    )
    size = re.search(r'viewBox="0 0 ([0-9.]+) [^"]*"', svg)
    assert size is not None  # matplotlib always writes it
    # Letters of the same size in a narrow figure as in a wide one.
    width = f"--width: {float(size[1]) * 1.45:.0f}px"
    opening = (
        f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" {size[0]} style="{width}" role="img" '
        f'aria-label="{Markup.escape(drawing.alt)}">'
    )
    return Markup(opening + svg[svg.index(">") + 1 :])  # noqa: S704  matplotlib has escaped the text inside
