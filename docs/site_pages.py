"""What the site has beside docs/: pages and tables that the code knows.

These are README and its neighbours, the commands' help, Python's names, the records of devices, the published
recipes (at ``<!-- recipes -->``) and what a script prints in Markdown (at ``<!-- output: SCRIPT -->``).

``mkdocs.yml`` names this file as a hook. Links that leave ``docs/`` lead to such a page, or become plain text
where the file is no page. A link to a file that is not there stays, and mkdocs refuses it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import TYPE_CHECKING

import click
from griffe import Extension
from mkdocs.structure.files import File

from ablate import store
from ablate.check.record import page as record_page
from ablate.check.record import read_proof
from ablate.cli import cli
from ablate.recipes.describe import describe
from ablate.recipes.presets import PRESETS
from ablate.reports.pages import document

if TYPE_CHECKING:
    from griffe import Object
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s:]+)(#[^)\s]*)?\)")
OUTPUT = re.compile(r"<!-- output: (.*) -->")
EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINKED = PAGES | {
    "ablate/store/__init__.py": "files.md",
    "reports/pages/document.py": "report-json.md",
}
SOURCES = {page: source for source, page in PAGES.items()}
PYTHON = """
# Python

## Results

::: ablate.open_study
::: ablate.reports.open_study.OpenStudy

## A recipe on any torch model

[How to use it](numerics.md#for-your-own-model).

::: ablate.numerics.apply_recipe
::: ablate.numerics.RecipeState
    options: {members: [advance, state_dict, load_state_dict]}
::: ablate.numerics.fake_quantize
::: ablate.numerics.OperandPolicy
    options: {members: []}

## One run

::: ablate.train_run
::: ablate.workflow.train_run.TrainedRun

[A training function of your own](models.md#your-own-training-function) is called as `train` is.

::: ablate.train.train
::: ablate.train.TrainResult
::: ablate.train.Snapshot

## A back end of your own

::: ablate.backends.protocol.Backend
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that no file in docs/ holds."""
    for source, page in PAGES.items():
        files.append(
            File.generated(
                config, page, content=(REPOSITORY / source).read_text(encoding="utf-8")
            )
        )
    files.append(File.generated(config, "commands.md", content=_help(cli, "ablate")))
    files.append(File.generated(config, "python.md", content=PYTHON))
    for name, title, module in (
        ("files.md", "Files of the run store", store),
        ("report-json.md", "Keys of report.json", document),
    ):
        files.append(
            File.generated(config, name, content=f"# {title}\n\n{module.__doc__}")
        )
    for record in sorted((REPOSITORY / "docs" / "devices").glob("*.json")):
        content = record_page(read_proof(record))
        files.append(
            File.generated(config, f"devices/{record.stem}.md", content=content)
        )
    return files


def on_page_markdown(markdown: str, *, page: Page, files: Files, **_: object) -> str:
    """Put in the tables, and turn links between files of the repository into links between pages."""
    markdown = markdown.replace("<!-- recipes -->", recipes())
    markdown = OUTPUT.sub(lambda mark: _output(mark[1]), markdown)
    return LINK.sub(partial(_link, page.file.src_uri, files), markdown)


def recipes() -> str:
    """Return the table of the published recipes."""
    rows = ["| recipe | what | operands | source | checked |", "|---|---|---|---|---|"]
    for preset in PRESETS.values():
        source = f"[{preset.source.authors}, {preset.source.date}]({preset.source.url})"
        cells = (
            f"`{preset.name}`",
            preset.summary,
            describe(preset.recipe),
            source,
            preset.checked,
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _link(page: str, files: Files, link: re.Match[str]) -> str:
    text, path, anchor = link[1], link[2], link[3] or ""
    target = normpath(
        f"{dirname(SOURCES.get(page, f'docs/{page}'))}/{path}".lstrip("/")
    )
    inside = files.get_file_from_path(
        LINKED.get(target) or target.removeprefix("docs/")
    )
    if inside is None:
        return text if (REPOSITORY / target).exists() else link[0]
    # a file's name says little where there are no files
    if inside.page and text == path:
        text = inside.page.title
    return f"[{text}]({relpath(inside.src_uri, dirname(page) or '.')}{anchor})"


def _help(command: click.Command, name: str, above: click.Context | None = None) -> str:
    """Return the help of a command and, below it, of the verbs under it."""
    context = click.Context(
        command, above, name, max_content_width=100, terminal_width=100
    )
    path = context.command_path
    blocks = [
        f"{'#' * len(path.split())} {path}",
        f"```text\n{command.get_help(context)}\n```",
    ]
    if isinstance(command, click.Group):
        for verb in command.list_commands(context):
            below = command.get_command(context, verb)
            assert below
            blocks.append(_help(below, verb, context))
    return "\n\n".join(blocks)


def _output(script: str) -> str:
    done = subprocess.run(
        [sys.executable, script],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


class Examples(Extension):
    """Make blocks of code of the examples in docstrings, which are quotations in Markdown."""

    def on_object(self, *, obj: Object, **_: object) -> None:
        """Fence the examples of one docstring."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(
                r"```pycon\n\g<0>\n```", obj.docstring.value
            )
