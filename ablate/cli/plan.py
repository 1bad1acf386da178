"""``ablate plan``: what a study would run, with nothing started."""

from __future__ import annotations

from typing import Any

import click

from ablate.cli.common import price_option, set_option, storage_option


@click.command("plan")
@click.argument("study")
@click.option("--json", "as_json", is_flag=True, help="Everything, as one JSON object.")
@click.option(
    "--dry-run", is_flag=True, help="Also build every arm's model without memory and check all shapes."
)
@click.option("--layers", is_flag=True, help="List what each linear layer of each arm carries.")
@click.option("--runs", "all_runs", is_flag=True, help="List every run with its id and state.")
@click.option(
    "--hardware",
    multiple=True,
    metavar="NAME",
    help="Model memory and GPU-hours on this hardware, such as B200; may be given again.",
)
@set_option
@price_option("adds what the study costs there")
@storage_option
def command(study: str, settings: tuple[str, ...], **options: Any) -> None:
    """Show the runs of STUDY without starting any.

    STUDY is a YAML file, or the name of a shipped study. Runs that the storage holds already are shown with
    their state; `ablate run` would start the others. Where the data are not there, all that does not depend
    on them is shown, and then what is missing.

    Memory and GPU-hours on named hardware are modelled. They are shown for studies that take GPUs, and with
    --hardware and --price for any.

    \b
    Example:
      ablate plan quickstart
      ablate plan my-study.yaml --set base.training.learning_rate=1e-3 --set seeds=5
      ablate plan my-study.yaml --json | jq '.arms[].name'
      ablate plan llama31-8b-mlperf --hardware MI355X --price MI355X=3
    """  # noqa: D301  \b is click's mark for a paragraph that keeps its line breaks
    from ablate.cli.plan_text import show_plan
    from ablate.study import load_study

    show_plan(load_study(study, settings), **options)
