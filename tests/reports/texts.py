"""Texts that were read are held: ``REWRITE=1 pytest`` writes them anew, to be read as a diff."""

from __future__ import annotations

import re
from pathlib import Path

from ablate._version import __version__
from ablate.execute.environment import code_digest
from ablate.reports.pages.render import definitions, escape_markdown
from ablate.reports.words import caveats
from ablate.reports.words.tables import matrix_tables
from ablate.reports.words.verdict import write_verdict
from tests import golden

HERE = Path(__file__).parent


def check_page(name, path):
    """Hold a page as Markdown to ``snapshots``."""
    text = path.read_text().replace(f"ablate {__version__}", "ablate VERSION")
    text = text.replace(escape_markdown(str(path.parent)), "FOLDER")
    check_text(name, text.replace(code_digest(), "CODE"))


def check_text(name, text):
    golden.check_text(HERE / "pages" / "snapshots" / f"{name}.txt", text)


def check_words(name, lines):
    """Hold what is said in one case to ``words/verdicts.txt``."""
    path = HERE / "words" / "verdicts.txt"
    known = re.findall(r"^## (.+)\n((?:.+\n)+)", path.read_text(), flags=re.MULTILINE)
    told = dict(known) | {name: "".join(f"{line}\n" for line in plain(lines))}
    whole = [f"## {key}\n{words}" for key, words in told.items()]
    golden.check_text(path, "\n".join(whole))


def plain(lines):
    """Leave out empty lines, and write each with single spaces."""
    return [" ".join(line.split()) for line in lines if line]


def said_of(analysis):
    """All that is said of a study: the verdict, its matrices, the cautions, and how costs are defined."""
    verdict = write_verdict(analysis)
    defined = dict(definitions(analysis))
    lines = [f"take: {verdict.take}", verdict.lead, verdict.more, verdict.count]
    lines += [f"{finding.tone}: {finding.text}" for finding in verdict.findings]
    for table in matrix_tables(analysis, verdict.findings):
        lines += map(" | ".join, table.rows)
    lines += verdict.notes
    cautions = (*caveats.notices(analysis), *caveats.warnings(analysis, ()))
    lines += [f"! {text}" for text in cautions]
    lines.append(defined.get("Token cost") or defined["Final loss difference"])
    return plain(lines)
