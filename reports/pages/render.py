"""Analysis → ``report.html`` and ``report.md``.

The HTML file holds everything inside itself (pictures as inline SVG, styles, no scripts) and forbids itself
the network by its own content policy. Every user string goes through the template's escaping; Markdown has
an escaping of its own, for a ``|`` in a name would break the table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ablate._version import __version__
from ablate.reports.figures.canvas import CONTEXT, FAINT, GRID, HUES, INK, SHADE
from ablate.reports.pages import speed_tables, tables
from ablate.reports.pages.diagnosis_table import diagnosis_table
from ablate.reports.statistics.stopping import levels_of
from ablate.reports.words import words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.reports.figures import Drawing
    from ablate.reports.findings.analyse import Analysis
    from ablate.reports.findings.diagnoses import ArmDiagnosis
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

    ``prices``: USD for a device-hour, by the hardware's name. ``diagnosed``: what the runs' diagnostics
    say. ``refresh_sec``: a browser loads the page again
    after so long, for a report that is being written anew while a study runs.
    """

    analysis: Analysis
    verdict: Verdict
    notices: Sequence[str]
    warnings: Sequence[str]
    drawings: Sequence[Drawing]
    prices: Mapping[str, float]
    diagnosed: Sequence[ArmDiagnosis] = ()
    refresh_sec: int | None = None


def render_html(content: Content) -> str:
    """Return the self-contained page."""
    pictures = {drawing.name: inline_svg(drawing) for drawing in content.drawings}
    return (
        page_environment(autoescape=True)
        .get_template("report.html.j2")
        .render(_values(content) | {"pictures": pictures})
    )


def render_markdown(content: Content) -> str:
    """Return the page as Markdown, with the figures as links to their files."""
    environment = page_environment(autoescape=False)
    environment.filters["md"] = escape_markdown
    return environment.get_template("report.md.j2").render(_values(content))


def escape_markdown(text: str) -> str:
    """Escape what Markdown, or HTML inside it, would read as markup; a line break becomes a space."""
    flat = " ".join(str(text).split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_{}\[\]#|~$]|^>)", r"\\\1", flat)


def page_environment(*, autoescape: bool) -> Environment:
    """Return the templates of all pages."""
    # Markdown is not HTML: it has its own filter on every user string (the tests look).
    return Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=autoescape,  # noqa: S701
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _values(content: Content) -> dict[str, Any]:
    analysis = content.analysis
    steps = tables.step_table(analysis)
    return {
        "analysis": analysis,
        "verdict": content.verdict,
        "notices": content.notices,
        "warnings": content.warnings,
        "drawings": content.drawings,
        "headline": tables.headline(analysis),
        "stopped": tables.stop_table(analysis),
        "steps": steps,
        "effects": tables.effect_table(analysis),
        "power": tables.power_table(analysis),
        "reached": tables.reached_table(analysis),
        "tuning": tables.tuning_table(analysis),
        "costs": [
            (title, table)
            for title, table in (
                ("Measured", speed_tables.measured_table(analysis, content.prices)),
                ("Modelled, at this study's shapes", speed_tables.modelled_table(analysis, content.prices)),
                ("Modelled, at the shapes of Llama 3.1 8B", speed_tables.large_table(analysis)),
                ("How good the model is", speed_tables.check_table(analysis)),
            )
            if table is not None
        ],
        "published": tables.published_table(analysis),
        "diagnosed": [finding for arm in content.diagnosed for finding in arm.findings],
        "diagnoses": diagnosis_table(content.diagnosed),
        "refresh_sec": content.refresh_sec,
        "runs": tables.run_table(analysis),
        "arms": tables.arm_table(analysis),
        "definitions": definitions(analysis),
        "environments": [
            (count, ", ".join(f"{key} {value}" for key, value in environment.items() if value is not None))
            for environment, count in analysis.environments
        ],
        "backends": analysis.backends,
        "training": ", ".join(f"{k} {v}" for k, v in analysis.training.items() if v is not None),
        "target": words.target(analysis.target),
        "ended": words.moment(analysis.last_ended_unix),
        "version": __version__,
    }


def _pooled(analysis: Analysis) -> tuple[tuple[str, str], ...]:
    """Say what runs may differ in and are pooled all the same; nothing where nothing is waived."""
    if not analysis.waived:
        return ()
    return (("Waived", f"runs that differ in {', '.join(analysis.waived)} are pooled."),)


def _early_stops(analysis: Analysis) -> tuple[tuple[str, str], ...]:
    """Say what the study's stop rule is; nothing without one."""
    rule = analysis.rule
    if rule is None:
        return ()
    parts = []
    if rule.diverged is not None:
        parts.append(f"an arm is stopped after {words.plural(rule.diverged, 'diverged run')}")
    if rule.hopeless is not None:
        levels = words.levels(levels_of(rule.hopeless))
        looks = words.listed([str(n) for n in rule.hopeless.looks])
        parts.append(
            "an arm is stopped at the first look where the lower end of its token cost's interval is above "
            f"{words.share(rule.hopeless.cost_above)}; looks after {looks} seeds, {rule.hopeless.spending} "
            f"spending, nominal levels {levels} (repeated confidence intervals)"
        )
    return (("Early stops", f"{'; '.join(parts)}."),)


def definitions(analysis: Analysis) -> tuple[tuple[str, str], ...]:
    """Return the words of the report with what they mean in this study."""
    if analysis.paired:
        test = "by Student's t on the differences of seeds in common (the study declares its seeds paired)"
    else:
        test = "by Welch's t on log T"
    ratios = [arm.token_cost.variance_ratio for arm in analysis.others if arm.token_cost.variance_ratio]
    if ratios:
        listed = ", ".join(
            f"{arm.name} {arm.token_cost.variance_ratio:.2f}"
            for arm in analysis.others
            if arm.token_cost.variance_ratio
        )
        test += f"; realised gain of pairing (variance unpaired over paired, above 1 is a gain): {listed}"
    interval = words.tokens(analysis.resolution.interval_tokens)
    of_target = words.share(analysis.resolution.share)
    not_reached = (
        "censored: the budget ended before the target. Diverged is an end of its own and counts as never "
        "reaching. Such an arm has no estimate, only a bound, with those runs at their budget."
    )
    formula = "exp(mean log T of the arm − mean log T of the baseline) − 1"
    return (
        ("Target", f"{words.target(analysis.target)}."),
        ("Tokens to target", f"{words.RULES[analysis.target.crossing]}; over seeds the geometric mean."),
        (
            "Token cost",
            f"{formula}, with its {words.coverage(analysis.rule)} interval {test}.",
        ),
        ("Not reached", not_reached),
        ("Break-even", "1 + token cost: the throughput over the baseline's from which the arm pays."),
        ("Evaluation interval", f"{interval} tokens, {of_target} of the baseline's tokens to target."),
        ("Learning-rate schedule", f"{analysis.training.get('schedule', 'not recorded')}."),
        ("Timing", _timing(analysis)),
        *_early_stops(analysis),
        *_pooled(analysis),
    )


def _timing(analysis: Analysis) -> str:
    """Say what the timing of the runs is worth, and where a measured speed-up is from."""
    record = analysis.throughput
    alone = record is not None and bool(record.rates)
    if analysis.timing.kind == "native":
        text = "native and unshared in every run, as far as the runs can tell."
    elif analysis.timing.kind == "logged":
        text = "as their logs say: read from logs that others wrote, so nothing here is a measured speed-up."
    else:
        text = (
            f"not native and unshared in every run: {words.timing_reasons(analysis.timing)}. Tokens/s of "
            "these runs are not those of FP4 hardware"
        )
        text += "." if alone else ", and nothing here is a measured speed-up."
    if record is None or not alone:
        return text
    return f"{text} Measured speed is from `ablate throughput` ({words.timed_alone(record)})."


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
