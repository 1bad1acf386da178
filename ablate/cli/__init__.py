"""The command line. A verb's module is imported only when it is called: start-up is a feature.

Bad input ends with one line per problem on standard error and exit code 2, never with a traceback.
"""

from __future__ import annotations

import io
import pkgutil
import sys

import click

from ablate._version import __version__
from ablate.base.errors import UserError, likely, safe_text
from ablate.base.files import restrict_umask

# group in --help -> verb -> (one line of help, where its command is defined)
_GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "Study": {
        "init": (
            "Write a first study with comments, or print the schema of study files.",
            "planning:init",
        ),
        "pilot": (
            "Train the baseline with two seeds; advise on target, seeds and time.",
            "planning:pilot",
        ),
        "run": ("Run what a study lacks, then write its report.", "run:command"),
        "try": (
            "Keep or discard a change of a study's baseline: better, or noise?",
            "run:try_command",
        ),
        "search": (
            "Search the best recipes of a grid, then write their front.",
            "run:search",
        ),
        "submit": (
            "Run a study on a Ray cluster, as a job that lives there.",
            "run:submit",
        ),
        "plan": ("Show the runs of a study without starting any.", "planning:plan"),
        "status": ("Show the progress of a study.", "manage:status"),
        "logs": ("Show a run's attempts and what they printed.", "manage:logs"),
        "cancel": ("Stop a study wherever it is being run.", "manage:cancel"),
        "clean": ("Remove what a study no longer needs.", "manage:clean"),
        "recipes": (
            "List the published recipes, or show one in full.",
            "recipes:command",
        ),
    },
    "Results": {
        "report": ("Write a study's report.", "report:report"),
        "compare": ("Put studies side by side.", "report:compare"),
        "import": ("Make a study of logs that others wrote.", "import_:command"),
        "dashboard": (
            "Open a study's pages in MLflow, or only send what MLflow lacks.",
            "report:dashboard",
        ),
    },
    "Hardware": {
        "check": (
            "Check back ends, a device or a quantiser; time a study's steps.",
            "check:command",
        ),
        "diagnose": (
            "Rank a model's layers and GEMMs by the harm that FP4 would do.",
            "diagnose:command",
        ),
    },
}
VERBS = {
    verb: place for group in _GROUPS.values() for verb, (_, place) in group.items()
}


class _LazyGroup(click.Group):
    """A group that knows its verbs' help without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name in VERBS:
            command: click.Command = pkgutil.resolve_name(
                f"ablate.cli.{VERBS[cmd_name]}"
            )
            return command
        if cmd_name == "" or cmd_name.startswith("-"):
            return None
        hint = likely(cmd_name, VERBS, f"expected one of {', '.join(VERBS)}")
        raise UserError(f"no command '{cmd_name}' ({hint})")

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002
        formatter: click.HelpFormatter,
    ) -> None:
        for group, verbs in _GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([(verb, line) for verb, (line, _) in verbs.items()])


@click.group(
    cls=_LazyGroup,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "show_default": True,
    },
    epilog="Start with:  ablate run quickstart",
)
@click.version_option(__version__, prog_name="ablate")
def cli() -> None:
    """Find out which GEMMs of a linear layer can be trained in FP4, and what that costs."""


def main() -> None:
    """Run the command line; turn a user's mistakes into one line each and exit code 2."""
    for stream in (sys.stdout, sys.stderr):  # their encoding may lack what is printed
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    restrict_umask()
    try:
        code = cli.main(standalone_mode=False)
    except UserError as error:
        for problem in error.problems:
            click.echo(safe_text(str(problem)), err=True)
        sys.exit(2)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(2)
    except click.ClickException as error:
        message = error.format_message()
        if isinstance(error, click.UsageError) and error.ctx:
            command = error.ctx.command_path
        else:
            command = "ablate"
        click.echo(f"{command}: {message}", err=True)
        sys.exit(2)
    except click.Abort:
        sys.exit(130)
    except SystemExit:
        # Without standalone mode, click itself exits only if the reader of a pipe (head, less) has closed it.
        sys.exit(0)
    sys.exit(code if isinstance(code, int) else 0)
