"""The command line. Each verb is a module of its own, imported only when it is called: start-up is a feature.

Bad input ends with one line per problem on standard error and exit code 2, never with a traceback.
"""

from __future__ import annotations

import importlib
import sys

import click

from ablate._version import __version__
from ablate.base.errors import UserError, safe_text
from ablate.base.files import keep_others_out

# verb -> (group in --help, one line of help, module that defines ``command``)
VERBS: dict[str, tuple[str, str, str]] = {
    "run": ("Study", "Run a study: only what is missing, then its report.", "ablate.cli.run"),
    "search": ("Study", "Search a grid's recipes for the best, then write its front.", "ablate.cli.search"),
    "submit": ("Study", "Run a study on a Ray cluster, as a job that lives there.", "ablate.cli.submit"),
    "plan": ("Study", "Show the runs of a study without starting any.", "ablate.cli.plan"),
    "status": ("Study", "Show how far a study is.", "ablate.cli.status"),
    "logs": ("Study", "Show a run's attempts and what they printed.", "ablate.cli.logs"),
    "cancel": ("Study", "Stop a study wherever it is being run.", "ablate.cli.cancel"),
    "clean": ("Study", "Remove what a study no longer needs.", "ablate.cli.clean"),
    "recipes": ("Study", "List the published recipes, or show one in full.", "ablate.cli.recipes"),
    "schema": ("Study", "Print the JSON Schema of study files, for editors.", "ablate.cli.schema"),
    "report": ("Results", "Write a study's report.", "ablate.cli.report"),
    "compare": ("Results", "Put two studies side by side.", "ablate.cli.compare"),
    "trend": ("Results", "Show each arm's token cost over the size of the model.", "ablate.cli.trend"),
    "import": ("Results", "Make a study of logs that others wrote.", "ablate.cli.import_"),
    "sync": ("Results", "Send what MLflow lacks of a study.", "ablate.cli.sync"),
    "dashboard": ("Results", "Open MLflow's pages at a study.", "ablate.cli.dashboard"),
    "backends": (
        "Hardware",
        "Show which formats this machine runs, how and how fast.",
        "ablate.cli.backends",
    ),
    "doctor": ("Hardware", "Test the back ends on this machine's device, bit by bit.", "ablate.cli.doctor"),
    "diagnose": (
        "Hardware",
        "Rank a model's layers and GEMMs by what FP4 would do to them.",
        "ablate.cli.diagnose",
    ),
    "throughput": ("Hardware", "Time the training steps of a study's arms.", "ablate.cli.throughput"),
}


class _LazyGroup(click.Group):
    """A group that knows its verbs' help without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(VERBS[cmd_name][2]).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name and not name.startswith("-") and name not in VERBS:
            import difflib

            likely = difflib.get_close_matches(name, VERBS, n=1)
            hint = f"did you mean '{likely[0]}'?" if likely else f"expected one of {', '.join(VERBS)}"
            raise UserError(f"no command '{name}' ({hint})")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        groups: dict[str, list[tuple[str, str]]] = {}
        for verb, (group, line, _) in VERBS.items():
            groups.setdefault(group, []).append((verb, line))
        for group, rows in groups.items():
            with formatter.section(group):
                formatter.write_dl(rows)


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start with:  ablate run quickstart",
)
@click.version_option(__version__, prog_name="ablate")
def cli() -> None:
    """Find out which GEMMs of a linear layer can be trained in FP4, and what that costs."""


def main() -> None:
    """Run the command line; turn a user's mistakes into one line each and exit code 2."""
    keep_others_out()
    try:
        code = cli.main(standalone_mode=False)
    except UserError as error:
        for problem in error.problems:
            click.echo(safe_text(str(problem)), err=True)
        sys.exit(2)
    except click.ClickException as error:
        message = error.format_message()
        command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "ablate"
        click.echo(f"{command}: {message}", err=True)
        sys.exit(2)
    except click.Abort:
        sys.exit(130)
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe, which is not an error.
        sys.stderr.close()
        sys.exit(0)
    sys.exit(code if isinstance(code, int) else 0)
