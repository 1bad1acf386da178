"""``ablate search``: try recipes round by round at rising budgets, then write the front to confirm.

Exit codes: 0 the search is done; 1 the baseline failed, or something ended it; 2 bad input; 130 interrupted.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ablate.base.command_hints import command_line
from ablate.base.errors import UserError
from ablate.cli.common import address_option, ended_by_ctrl_c, json_option, storage_option, tracking_option
from ablate.cli.output import echo_json, format_table, table_text, terminal_width

if TYPE_CHECKING:
    from ablate.cli.display import ConsoleListener
    from ablate.search.plan import SearchPlan
    from ablate.workflow import Where
    from ablate.workflow.search import SearchEnd


@click.command("search")
@click.argument("file")
@click.option("--plan", "only_plan", is_flag=True, help="Show what would be searched; start nothing.")
@json_option
@address_option
@tracking_option
@click.option(
    "--optuna-storage",
    metavar="URL",
    help="grpc://HOST:PORT or a database's URL (default: a journal in the search's folder).",
)
@storage_option
def command(file: str, only_plan: bool, as_json: bool, optuna_storage: str | None, **where: Any) -> int:
    """Search the recipes of FILE (a study file with `search:`, or a shipped one) for the best.

    Two objectives: loss at equal tokens, or token cost; and modelled step time on named hardware. The same
    command goes on after an interruption and never repeats a trial.

    \b
    Examples:
      ablate search tiny-search --plan
      ablate search tiny-search
      ablate search my-search.yaml --address ray://head:10001 --optuna-storage grpc://head:13000
    """  # noqa: D301  \b is click's mark for a paragraph that keeps its line breaks
    with ended_by_ctrl_c(command_line("search", file, **where, optuna_storage=optuna_storage)):
        from ablate.search.plan import plan_search
        from ablate.study import load_study
        from ablate.workflow import Where, say_mirror

        study = load_study(file)
        place = Where(**where)
        if study.search is None:
            start = place.command_line("run", file)
            raise UserError(f"{file}: it has no 'search:', so it is a study (start it with: {start})")
        planned = plan_search(study)
        if only_plan:
            _show_plan(planned, as_json=as_json)
            return 0
        from ablate.cli.display import console_listener
        from ablate.workflow.search import search_study

        listener = console_listener(stderr=as_json)
        end = search_study(planned, place, listener, file=file, optuna_storage=optuna_storage)
        _show_found(end, listener, place, as_json=as_json)
        say_mirror(end.mirror, end.tracking_uri, planned.name, place, listener)
        return end.exit_code


def _show_found(end: SearchEnd, listener: ConsoleListener, place: Where, *, as_json: bool) -> None:
    from ablate.reports.pages.compare import CONFIRM
    from ablate.reports.pages.document import search_document
    from ablate.reports.words.search import front_table, search_sentences

    found = end.found
    if as_json:
        echo_json(search_document(found), allow_nan=False, ensure_ascii=False)
    else:
        click.echo(f"\n{table_text(front_table(found))}\n")
    for sentence in (*search_sentences(found), f"\nReport:  {end.pages / 'search.html'}"):
        listener.say(sentence)
    if (end.pages / CONFIRM).exists():
        listener.say(f"Confirm: {place.command_line('run', str(end.pages / CONFIRM))}")


def _show_plan(planned: SearchPlan, *, as_json: bool) -> None:
    """Print candidates, what is dropped, presets, rounds and tokens."""
    from ablate.search.grid import IRRELEVANT
    from ablate.search.halving import short_tokens

    search, plan = planned.search, planned.halving
    rounds = -(-plan.num_trials // plan.at_once)
    counts, dropped = plan.most_trials, planned.plans[0].dropped
    most_tokens = sum(
        count * at_budget.arm(planned.baseline).batches.tokens
        for count, at_budget in zip(counts, planned.plans, strict=True)
    )
    if as_json:
        content = {
            "search": planned.name,
            "baseline": planned.baseline,
            "first": list(planned.first),
            "objective": search.objective,
            "hardware": search.hardware,
            "shapes": search.shapes,
            "budgets": search.budgets,
            "trials": list(counts),
            "rounds": rounds,
            "tokens": most_tokens,
            "recipes": [
                {
                    "name": candidate.name,
                    "gemms": planned.plans[0].arm(candidate.name).recipe,
                    "levels": candidate.levels,
                    "step_time_over_baseline": planned.times[candidate.name],
                    "runs": [one.arm(candidate.name).runs[0].id for one in planned.plans],
                }
                for candidate in plan.grid.candidates
            ],
            "dropped": [asdict(one) for one in dropped],
        }
        echo_json(content, ensure_ascii=False)
        return
    factors = [factor.removeprefix("recipe.") for factor in search.factors]
    rows = [
        (
            candidate.name,
            *(candidate.levels.get(factor, IRRELEVANT) for factor in search.factors),
            f"{planned.times[candidate.name]:.3f}×",
            "first" if candidate.name in planned.first else "",
        )
        for candidate in plan.grid.candidates
    ]
    click.echo(format_table(("recipe", *factors, "step time", ""), rows, width=max(80, terminal_width())))
    where = "this study's own shapes" if search.shapes == "study" else "the shapes of Llama 3.1 8B"
    click.echo(f"\nstep time  over that of {planned.baseline}, modelled on {search.hardware} at {where}")
    click.echo(f"objective  {'validation loss at the end' if search.objective == 'loss' else 'token cost'}")
    for count, budget, word in zip(counts, search.budgets, ("", *["at most "] * len(counts)), strict=False):
        click.echo(f"budget     {short_tokens(budget)} tokens: {word}{count} trials of {len(rows)} recipes")
    click.echo(f"rounds     {rounds} of {plan.at_once} at the first budget; {most_tokens:,} tokens at most")
    if dropped:
        click.echo(f"\ndropped: {len(dropped)}")
    for one in dropped:
        click.echo(f"  {one.name}: {one.reason}")
