"""``ablate run``, ``ablate search``, and ``ablate submit``, which runs a study as a Ray job.

Exit codes: 0 every run asked for has a result; 1 one of them failed; 2 bad input; 130 interrupted.
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
from typing import TYPE_CHECKING, Any

import click

from ablate.base.command_hints import command_line, redact
from ablate.base.errors import UserError, safe_text
from ablate.cli.common import (
    FOLDER,
    PATH,
    address_option,
    count_option,
    deliver,
    echo_lines,
    ended_by_ctrl_c,
    flag,
    json_option,
    refuse_other_options,
    set_option,
    storage_option,
    study_argument,
    table_of,
    table_text,
    tracking_option,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ablate.search.halving import SearchPlan
    from ablate.workflow import StudyEnd

_LOG_LINES = 6
_RECIPES = {
    "recipe": "{of.name}", "GEMMs": "{of.recipe}", "step time": "{time:.3f}×", "": "{first}",
}  # fmt: skip


def _seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(
            f"--seeds: '{text}' is no list of seeds (expected such as 0,1,4)"
        ) from None


@click.command("run")
@study_argument
@click.option(
    "--only", multiple=True, metavar="ARM", help="Run only this arm (may be repeated)."
)
@click.option(
    "--seeds",
    type=_seeds,
    metavar="LIST",
    help="Run only these seeds of the study: 0,1,4.",
)
@flag("--retry-failed", help="Run failed runs again, too.")
@flag(
    "--in-process",
    help="Train one run in this process, without Ray, for a debugger; store no result.",
)
@set_option
@address_option
@tracking_option
@storage_option
@click.pass_context
def command(
    context: click.Context, /, study: str, *, storage: Path, address: str | None, tracking_uri: str | None,
    in_process: bool, retry_failed: bool, **chosen: Any,
) -> int:  # fmt: skip
    """Run what STUDY lacks, then write its report.

    STUDY is a YAML file, or the name of a shipped or stored study. The same command continues after an
    interruption and never repeats a finished run.

    \b
    Examples:
      ablate run quickstart
      ablate run my-study.yaml --only fprop --seeds 0,1
      ablate run my-study.yaml --in-process --only fprop --seeds 0
      ablate run my-study.yaml --set base.training.learning_rate=1e-3 --set name=my-study-lr
      ablate run my-study.yaml --address ray://head:10001 --tracking-uri http://mlflow:5000
    """  # noqa: D301  \b is click's mark for a paragraph that keeps its line breaks
    if in_process:
        takes = {"in_process", "only", "seeds", "settings", "storage"}
        refuse_other_options(context, takes, "--in-process")
        return _run_in_process(study, storage, **chosen)
    with ended_by_ctrl_c() as again:
        from ablate.cli.display import ConsoleListener
        from ablate.workflow import Where
        from ablate.workflow.run import run_study

        listener = ConsoleListener()
        if (
            sys.stdout.isatty()
            and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        ):
            listener.say(
                "Closing the terminal stops this (nohup, tmux or `ablate submit` let it continue)."
            )
        where = Where(storage=storage, address=address, tracking_uri=tracking_uri)
        end = run_study(study, where, listener, retry_failed=retry_failed, **chosen)
        return conclude(listener.say, end, again)


def _run_in_process(study: str, storage: Path, **chosen: Any) -> int:
    from ablate.cli.display import ConsoleListener
    from ablate.workflow import Where
    from ablate.workflow.in_process import run_in_process

    where = Where(storage=storage)
    result = run_in_process(study, where, ConsoleListener(), **chosen)
    end = ": ".join(filter(None, (result.state, result.message)))
    click.echo(f"The run {end}, after {result.tokens:,} tokens. No result is stored.")
    return 0


def conclude(say: Callable[[str], None], end: StudyEnd, again: str) -> int:
    """Show failed runs with their last lines, and ``again``, the command to resume; return the exit code."""
    for sentence, log in end.failed.items():
        say(f"\nFailed: {safe_text(sentence)}  (log: {log})")
        if log.exists():
            printed = log.read_text(encoding="utf-8", errors="replace")
            for line in printed.splitlines()[-_LOG_LINES:]:
                say(f"    {safe_text(line)}")
    if end.outcome.problem:
        say(f"\n{end.outcome.problem}; what it ran goes on from its checkpoints.")
    if end.outcome.interrupted:
        say(f"\nStopped. Finished runs are kept; go on with: {again}")
        return 130
    if failed := end.states.count("failed"):
        say(f"\nFailed runs: {failed}; try again with: {again} --retry-failed")
    if missing := sum(
        state not in ("finished", "diverged", "failed") for state in end.states
    ):
        say(f"\nRuns without a result: {missing}; go on with: {again}")
    return 0 if end.is_done else 1


@click.command("try")
@study_argument
@click.option(
    "--change",
    "folder",
    type=FOLDER,
    metavar="DIR",
    help="The code to try, in place of the command's cwd: a git worktree, or a copy.",
)
@click.option(
    "--args",
    type=shlex.split,
    metavar="WORDS",
    help="Words in place of {args} in the command.",
)
@set_option
@click.option(
    "--margin",
    metavar="COST",
    help="A token cost that would still be kept, such as 3%. Default: 0.",
)
@count_option("--seeds", help="Seeds at most. Default: as many as the study's.")
@flag(
    "--loop",
    "in_loop",
    help="Hold the 5 % over all tries of this baseline, not over this one alone.",
)
@json_option
@address_option
@tracking_option
@storage_option
def try_command(
    study: str, *, folder: Path | None, args: list[str] | None, settings: tuple[str, ...], margin: str | None,
    seeds: int | None, in_loop: bool, as_json: bool, **where: Any,
) -> int:  # fmt: skip
    """Tell whether a change of STUDY's baseline is better, or whether that is noise.

    Both train seed by seed, until the change is shown to need fewer tokens to the target (keep) or more
    (discard; after half of the seeds also if it only looks so), or the seeds are used up (undecided). Of changes
    that are no better at most 5 % are kept. The baseline's runs are taken from the study and from earlier tries.
    The same command continues after an interruption, and repeats its answer.

    Exit codes: 0 keep, 10 discard, 11 undecided; 1, 2 and 130 as of `ablate run`.

    \b
    Examples:
      ablate try my-study.yaml --change ../my-worktree
      ablate try my-study.yaml --args "--optimizer muon" --seeds 8 --json
      ablate try my-study.yaml --set base.recipe=mxfp4 --margin 3%
    """  # noqa: D301  \b is click's mark for a paragraph that keeps its line breaks
    change = [setting.removeprefix("base.") for setting in settings]
    if args:
        change.insert(0, f"trainer.args={json.dumps(args)}")
    if folder is not None:
        change.insert(0, f"code={json.dumps(str(folder.resolve()))}")
    if not change:
        raise UserError("nothing to try (give --change DIR, --args or --set)")
    with ended_by_ctrl_c() as again:
        from ablate.cli.display import ConsoleListener
        from ablate.reports.pages.document import plain
        from ablate.reports.words.format import cost
        from ablate.results.change_rule import level_in_loop
        from ablate.workflow import Where
        from ablate.workflow.try_change import try_change

        listener = ConsoleListener(err=as_json)
        judgement, number, end = try_change(
            study, change, Where(**where), listener, margin=margin, seeds=seeds, in_loop=in_loop
        )  # fmt: skip
        decision = judgement.decision
        if decision == "open":
            return conclude(listener.say, end, again) or 1
        level = level_in_loop(number)
        content = {**plain(judgement), "number": number, "level_in_loop": level}
        text = (
            f"{decision}: token cost {cost(judgement.cost)} by {judgement.seeds} seeds of each side\n"
            f"Try {number} of this baseline: --loop holds 5 % over all of them, at {level:.2%} for this one."
        )
        deliver(content, [text], as_json=as_json)
        return {"keep": 0, "discard": 10}.get(decision, 11)


@click.command(
    "submit",
    epilog="Example:  ablate submit my-study.yaml --address http://head:8265 --storage /shared/ablate",
)
@study_argument
@click.option(
    "--address",
    required=True,
    metavar="URL",
    help="Address of the cluster's dashboard, http://head:8265.",
)
@click.option(
    "--storage", required=True, type=PATH, help="Folder that all nodes share."
)
@click.option(
    "--tracking-uri",
    metavar="URI",
    help="MLflow server (default: a database in the storage).",
)
@flag(
    "--no-follow",
    help="Do not wait for the job; do not show what it prints.",
)
@flag(
    "--insecure",
    help="Also submit to a cluster that asks nobody for a token.",
)
def submit(
    study: str,
    address: str,
    storage: Path,
    tracking_uri: str | None,
    *,
    no_follow: bool,
    insecure: bool,
) -> int:
    """Run STUDY (a YAML file, or a shipped study's name) on a Ray cluster, as a job that lives there.

    The job takes the study file and this version of ablate with it; the packages must be on the cluster.
    Submitting the same study again follows the existing job. Paths of data in the file must be absolute.
    """
    from ablate.execute import jobs
    from ablate.execute.cluster import use_token
    from ablate.study import load_study

    if not storage.is_absolute():
        raise UserError(
            f"--storage: {storage} (expected an absolute path that all nodes share)"
        )
    loaded = load_study(study)
    if loaded.search is not None:
        start = command_line("search", study, storage=storage, address="ADDRESS")
        raise UserError(f"{study}: a search is no job yet (start it with: {start})")
    if warning := use_token():
        click.echo(warning, err=True)
    if tracking_uri is not None and redact(tracking_uri) != tracking_uri:
        raise UserError(
            "--tracking-uri: Ray shows a job's settings to all who open its dashboard (leave the login out, "
            "and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD where the head node is started)"
        )
    jobs.check_server(address, insecure=insecure)
    environment = {}
    if tracking_uri is not None:
        environment["MLFLOW_TRACKING_URI"] = tracking_uri
    job, was_there = jobs.submit(
        address, loaded.path, loaded.name, str(storage), environment
    )
    click.echo(f"Job {job} {'is there already' if was_there else 'submitted'}.")
    if no_follow:
        status = command_line("status", loaded.name, storage=storage)
        click.echo(f"Follow it with the same command, or: {status}")
        return 0
    try:
        state = jobs.follow(address, job, lambda text: click.echo(text, nl=False))
    except KeyboardInterrupt:
        click.echo(
            f"\nThe job goes on; stop it with: ray job stop --address {address} {job}"
        )
        return 130
    click.echo(f"Job {job}: {state.lower()}")
    return 0 if state == "SUCCEEDED" else 1


@click.command("search")
@click.argument("file")
@flag(
    "--plan",
    "only_plan",
    help="Show what would be searched; start no trial.",
)
@json_option
@address_option
@tracking_option
@storage_option
def search(file: str, only_plan: bool, as_json: bool, **where: Any) -> int:
    """Search the recipes of FILE (a study file with `search:`, or a shipped one) for the best.

    It has two objectives: loss at equal tokens, or token cost; and modelled step time on named hardware. The
    same command continues after an interruption and never repeats a trial.

    \b
    Examples:
      ablate search tiny-search --plan
      ablate search tiny-search
      ablate search my-search.yaml --address ray://head:10001
    """  # noqa: D301  \b is click's mark for a paragraph that keeps its line breaks
    with ended_by_ctrl_c():
        from ablate.search.recipes import plan_search
        from ablate.study import load_study
        from ablate.workflow import Where

        study = load_study(file)
        place = Where(**where)
        if study.search is None:
            start = command_line("run", file, **where)
            raise UserError(
                f"{file}: it has no 'search:', so it is a study (start it with: {start})"
            )
        planned = plan_search(study, place.machines)
        if only_plan:
            if as_json:
                raise UserError("--json: not for --plan")
            echo_lines(_plan_lines(planned))
            return 0
        from ablate.cli.display import ConsoleListener
        from ablate.reports.pages.compare import CONFIRM
        from ablate.reports.pages.document import plain
        from ablate.reports.words.search import front_table, search_sentences
        from ablate.workflow.search import search_study

        listener = ConsoleListener(err=as_json)
        end = search_study(planned, place, listener, file=file)
        table = table_text(front_table(end.found))
        deliver(plain(end.found), [f"\n{table}\n"], as_json=as_json)
        for sentence in search_sentences(end.found):
            listener.say(sentence)
        listener.say(f"\nReport:  {end.pages / 'search.html'}")
        confirm = end.pages / CONFIRM
        if confirm.exists():
            listener.say(f"Confirm: {command_line('run', str(confirm), **where)}")
        return end.exit_code


def _plan_lines(planned: SearchPlan) -> Iterator[str]:
    search = planned.search
    first = planned.plans[0]
    rows = []
    for name in planned.cells:
        mark = "first" if name in planned.first else ""
        rows.append({"of": first.arm(name), "time": planned.times[name], "first": mark})
    yield table_of(_RECIPES, rows)
    shapes = f"{search.hardware}, shapes of {search.shapes}"
    yield f"\nstep time  over that of {planned.baseline}, modelled on {shapes}\nobjective  {search.objective}"
    tokens = 0
    for count, budget, then in zip(
        planned.most_trials, search.budgets, planned.plans, strict=True
    ):
        tokens += count * then.arm(planned.baseline).batches.tokens
        yield f"budget     {budget:,} tokens: at most {count} trials of {len(planned.cells)} recipes"
    rounds = -(-planned.num_trials // search.at_once)
    yield f"rounds     {rounds} at the first budget; {tokens:,} tokens at most"
    yield f"dropped    {len(first.dropped)}"
    yield from (f"  {cell.name}: {cell.reason}" for cell in first.dropped)
