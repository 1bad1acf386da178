"""Texts that were read are held: ``REWRITE=1 pytest`` writes them anew, to be read as a diff."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ablate._version import __version__
from ablate.execute.environment import code_digest
from ablate.reports.pages.render import definitions, escape_markdown
from ablate.reports.words import caveats
from ablate.reports.words.tables import matrix_tables
from ablate.reports.words.verdict import write_verdict

HERE = Path(__file__).parent


def check_page(name, path):
    """Hold a page as Markdown to ``snapshots``."""
    text = path.read_text().replace(f"ablate {__version__}", "ablate VERSION")
    check_text(
        name,
        text.replace(escape_markdown(str(path.parent)), "FOLDER").replace(
            code_digest(), "CODE"
        ),
    )


def check_text(name, text):
    golden = HERE / "pages" / "snapshots" / f"{name}.txt"
    if "REWRITE" in os.environ:
        golden.write_text(text)
    assert text == golden.read_text()


def check_words(name, lines):
    """Hold what is said in one case to ``words/verdicts.txt``."""
    golden = HERE / "words" / "verdicts.txt"
    known = dict(
        re.findall(r"^## (.+)\n((?:.+\n)+)", golden.read_text(), flags=re.MULTILINE)
    )
    text = "".join(" ".join(line.split()) + "\n" for line in lines if line)
    if "REWRITE" in os.environ:
        known[name] = text
        golden.write_text(
            "\n".join(f"## {key}\n{words}" for key, words in known.items())
        )
    assert text == known[name]


def said_of(analysis):
    """All that is said of a study: the verdict, its matrices, the cautions, and how costs are defined."""
    verdict = write_verdict(analysis)
    defined = dict(definitions(analysis))
    return [
        f"take: {verdict.take}",
        *(verdict.lead, verdict.more, verdict.count),
        *(f"{finding.tone}: {finding.text}" for finding in verdict.findings),
        *(
            " | ".join(row)
            for table in matrix_tables(analysis, verdict.findings)
            for row in table.rows
        ),
        *verdict.notes,
        *(
            f"! {text}"
            for text in (*caveats.notices(analysis), *caveats.warnings(analysis, ()))
        ),
        defined.get("Token cost") or defined["Final loss difference"],
    ]
