"""A command as the trainer of a run: its words, its environment, and what they become in one run.

Words between braces are replaced only if ``TEMPLATES`` or ``LISTS`` names them, so that the braces of JSON,
Hydra and shells pass. There is no shell.

How it fails: a section that contradicts itself is an error at its key (``said``); inherited variables that
would change the arithmetic are a ``UserError``.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, TypeAdapter

from ablate.base.config_base import Section, key, section
from ablate.base.errors import UserError
from ablate.recipes.policy import Recipe
from ablate.recipes.stacks import STACKS, Flags
from ablate.run.log_formats import FORMATS, PLACES
from ablate.run.log_rows import LogSource, compiled

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

TEMPLATES = (
    "python", "seed", "steps", "tokens", "run_dir", "attempt", "num_devices", "devices", "port", "node_rank",
    "num_nodes", "master_addr",
)  # fmt: skip
"""Words that are replaced in ``command``, ``args``, ``env`` and ``metrics.file``."""
LISTS = ("args", "recipe_args")
"""Words of their own that become several words."""
THE_COMMANDS = "read by the command"
"""In place of a digest of data, which only the command knows."""
REACHES = ("tokens", "seq_len", "batch_size", "divergence_loss", "divergence_evals")
"""Fields of training that mean something where a command trains."""
READS_RECIPE = "environment"
INHERITED = (
    "NVTE_*",
    "PRIMUS_*",
    "HEALING_*",
    "TORCH_ALLOW_TF32*",
    "NVIDIA_TF32_OVERRIDE",
    "NVIDIA_DISABLE_*",
)
"""Variables that change the arithmetic of known trainers. A run must not get them by accident."""
_FP4 = re.compile("(?i)fp4")
_TEMPLATE = re.compile(r"\{(" + "|".join(TEMPLATES) + r")\}")


if TYPE_CHECKING:
    RecipeTable = str
else:  # from the tables themselves, so that the schema and the hints always agree
    RecipeTable = Literal[READS_RECIPE, *STACKS]


@section
class Command(Section):
    """A program that trains one run, started as a list of words."""

    command: list[str] = key(
        list,
        "the program and its arguments, a word each; {seed}, {steps}, {run_dir} … are replaced",
    )
    args: list[str] = key(
        list, "more words, of an arm for instance, in place of the word {args}"
    )
    env: dict[str, str] = key(
        dict, "variables of the command's environment; templates are replaced, too"
    )
    cwd: str = key(".", "the folder in which it starts, relative to the study file")
    files: list[str] = key(
        list,
        "files whose contents change its result, relative to cwd; globs are allowed",
    )
    version: str | None = key(
        None, "whatever names the software: a container's digest, a release"
    )
    secrets: list[str] = key(
        list, "names of variables that it needs; their values are stored nowhere"
    )
    recipes: RecipeTable | None = key(
        None,
        "the table that turns the arm's recipe into {recipe_args} and variables; environment: the command "
        "reads $ABLATE_RECIPE itself",
    )
    precision: str | None = key(
        None, "without recipes: what the report calls the arm's arithmetic"
    )
    metrics: LogSource | None = key(None, "how its log is read")
    expect: list[str] = key(
        list, "regular expressions that its output must hold, or the run has failed"
    )
    refuse: list[str] = key(list, "regular expressions that its output must not hold")
    diverged: list[str] = key(
        list,
        "regular expressions of what it prints of a divergence: a run that then fails has diverged",
    )
    grace_sec: float = Field(
        120.0,
        description="seconds that it has after SIGTERM to save and end",
        ge=0,
        le=3600,
        strict=True,
    )
    log_limit_mb: int = Field(
        1024,
        description="MB of its output that are kept: the first and the last half",
        ge=1,
        strict=True,
    )
    dry_run_args: list[str] = key(
        list, "words that end it after one step, for `ablate plan --dry-run`"
    )

    def __post_init__(self) -> None:
        for part in ("expect", "refuse", "diverged"):
            for index, pattern in enumerate(getattr(self, part)):
                compiled(pattern, part, index)

    def faults(self) -> Iterator[tuple[str, str | None, str]]:
        """Yield what the parts of a whole section contradict: what is wrong, a hint, the key at fault."""
        if not self.command:
            yield (
                "no command",
                "write it as a list of words: [python, train.py, --seed, '{seed}']",
                "command",
            )
            return
        if self.metrics is None:
            yield (
                "nothing says how the command's log is read",
                f"write metrics: {{preset: …}} ({', '.join(FORMATS)}), or patterns, jsonl or tensorboard",
                "command",
            )
        elif not self.metrics.has_place:
            yield (
                f"nothing reads {', '.join(PLACES[:-1])} or {PLACES[-1]}",
                None,
                "metrics",
            )
        for name in LISTS:
            template = f"{{{name}}}"
            for part in ("command", "args", "dry_run_args"):
                if any(
                    template in word and word != template
                    for word in getattr(self, part)
                ):
                    yield (
                        f"{template} stands for whole words",
                        "make it a word of its own",
                        part,
                    )
        if self.args and "{args}" not in self.command:
            yield "args have no place in the command", "add the word '{args}'", "args"
        if self.recipes is not None and self.precision is not None:
            yield (
                "the recipe says what the arithmetic is",
                "leave precision out",
                "precision",
            )
        if not Path(self.cwd).is_dir():
            yield (
                f"no folder {self.cwd}",
                "relative paths start at the study file",
                "cwd",
            )

    @property
    def words(self) -> list[str]:
        """The command with ``args`` in their place; without a recipe that has flags, ``{recipe_args}`` is none."""
        words = _replaced(self.command, "{args}", self.args)
        return _replaced(words, "{recipe_args}", ())

    @property
    def line(self) -> str:
        """The folder and the words as a line for a shell, with the templates as they are."""
        return f"cd {shlex.quote(self.cwd)} && {shlex.join(self.words)}"

    @property
    def reads_recipe(self) -> bool:
        """Whether the arm's recipe reaches the command."""
        return self.recipes is not None or self._is_adapter

    @property
    def _is_adapter(self) -> bool:
        return self.metrics is not None and self.metrics.preset == "ablate"

    def with_recipe(self, flags: Flags) -> Command:
        """Put a recipe's words, variables and patterns in their place; what the study sets itself wins."""
        words = _replaced(self.command, "{recipe_args}", flags.args)
        return replace(
            self, command=words, env={**flags.env, **self.env}, expect=[*self.expect, *flags.expect],
            refuse=[*self.refuse, *flags.refuse],
        )  # fmt: skip

    @property
    def has_proof(self) -> bool:
        """Whether a line that its log must hold proves that layers follow the arm's recipe.

        A pattern with the group ``setup`` matches a line that says only what the trainer was asked for.
        """
        return self._is_adapter or any(
            "setup" not in re.compile(text).groupindex for text in self.expect
        )

    @property
    def identity(self) -> dict[str, object]:
        """What of it can change a result: not its place, secrets, how its log is read, or how it is asked to end."""
        return {
            "command": self.words,
            "env": self.env,
            "version": self.version,
            "precision": self.precision,
        }


def _replaced(
    words: Sequence[str], template: str, replacement: Sequence[str]
) -> list[str]:
    """Put several words in the place of one."""
    replaced: list[str] = []
    for word in words:
        replaced += replacement if word == template else [word]
    return replaced


def reading_of(trainer: str | Command | None) -> dict[str, object]:
    """Return how a command's log is read. Where that changes, the stored logs are read again."""
    if not isinstance(trainer, Command):
        return {}
    fields = asdict(trainer)
    return {name: fields[name] for name in ("metrics", "expect", "refuse", "diverged")}


def filled(text: str, values: Mapping[str, object]) -> str:
    """Replace the known templates in a text, and nothing else."""
    return _TEMPLATE.sub(lambda match: str(values[match[1]]), text)


def variables_of(recipe: Recipe, values: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that tell a command, and an adapter in it, what its run is."""
    written = TypeAdapter(Recipe).dump_python(
        recipe, mode="json", exclude_defaults=True
    )
    return {
        "ABLATE_SEED": str(values["seed"]),
        "ABLATE_TOKENS": str(values["tokens"]),
        "ABLATE_TOKENS_PER_STEP": str(values["tokens"] // values["steps"]),
        # By "rules" a reader tells a whole recipe from a short form.
        "ABLATE_RECIPE": json.dumps({"rules": (), **written}),
    }


def shell_line(command: Command, recipe: Recipe, values: Mapping[str, Any]) -> str:
    """Write a run's command as a line that can be pasted into a shell."""
    variables = variables_of(recipe, values) if command.reads_recipe else {}
    variables |= {name: filled(text, values) for name, text in command.env.items()}
    words = [filled(word, values) for word in command.words]
    if variables:
        words = ["env", *map("=".join, variables.items()), *words]
    return f"cd {shlex.quote(command.cwd)} && {shlex.join(words)}"


def lacks_proof(trainer: str | Command | None, recipe: Recipe) -> bool:
    """Tell whether a command trains in low precision, and nothing in its log has to prove it."""
    if not isinstance(trainer, Command) or trainer.has_proof:
        return False
    return recipe.is_ever_low or _FP4.search(trainer.precision or "") is not None


def secrets_of(
    trainer: str | Command | None, environment: Mapping[str, str]
) -> dict[str, str]:
    """Select the variables that a command asks for and that are set."""
    if not isinstance(trainer, Command):
        return {}
    return {name: environment[name] for name in trainer.secrets if name in environment}


def check_inherited(command: Command, environment: Iterable[str]) -> None:
    """Refuse variables of the environment that change the arithmetic and that the study does not set.

    Raises:
        UserError: there are such variables.
    """
    inherited = sorted(
        name
        for name in environment
        if name not in command.env
        and any(fnmatchcase(name, pattern) for pattern in INHERITED)
    )
    if inherited:
        raise UserError(
            f"the environment sets {', '.join(inherited)}, which can change the command's arithmetic",
            hint="unset it, or write it under trainer.env, so that it is part of the run",
        )
