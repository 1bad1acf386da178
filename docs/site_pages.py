"""What the site has beside docs/: README and its neighbours as pages, the commands' help, and Python's names.

``mkdocs.yml`` names this file as a hook. Links that leave ``docs/`` lead to such a page, or become plain text
where the file is no page. A link to a file that is not there stays, and mkdocs refuses it.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import TYPE_CHECKING

import click
from griffe import Extension
from mkdocs.structure.files import File

from ablate.cli import cli

if TYPE_CHECKING:
    from griffe import Object
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s:]+)(#[^)\s]*)?\)")
EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
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
        files.append(File.generated(config, page, content=(REPOSITORY / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "commands.md", content=_help(cli, "ablate")))
    files.append(File.generated(config, "python.md", content=PYTHON))
    return files


def on_page_markdown(markdown: str, *, page: Page, files: Files, **_: object) -> str:
    """Turn links between files of the repository into links between pages."""
    return LINK.sub(partial(_link, page.file.src_uri, files), markdown)


def _link(page: str, files: Files, link: re.Match[str]) -> str:
    text, path, anchor = link[1], link[2], link[3] or ""
    target = normpath(f"{dirname(SOURCES.get(page, f'docs/{page}'))}/{path}".lstrip("/"))
    inside = files.get_file_from_path(PAGES.get(target) or target.removeprefix("docs/"))
    if inside is None:
        return text if (REPOSITORY / target).exists() else link[0]
    if inside.page and text == path:  # a file's name says little where there are no files
        text = inside.page.title
    return f"[{text}]({relpath(inside.src_uri, dirname(page) or '.')}{anchor})"


def _help(command: click.Command, name: str, above: click.Context | None = None) -> str:
    """Return the help of a command and, below it, of the verbs under it."""
    context = click.Context(command, above, name, max_content_width=100, terminal_width=100)
    path = context.command_path
    blocks = [f"{'#' * len(path.split())} {path}", f"```text\n{command.get_help(context)}\n```"]
    if isinstance(command, click.Group):
        for verb in command.list_commands(context):
            below = command.get_command(context, verb)
            assert below
            blocks.append(_help(below, verb, context))
    return "\n\n".join(blocks)


class Examples(Extension):
    """Make blocks of code of the examples in docstrings, which are quotations in Markdown."""

    def on_object(self, *, obj: Object, **_: object) -> None:
        """Fence the examples of one docstring."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
