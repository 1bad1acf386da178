"""``ablate doctor``: prove the back ends on the real device."""

from __future__ import annotations

from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING

import click

from ablate.cli.common import chosen_device, json_option, known_backend
from ablate.cli.output import echo_json

if TYPE_CHECKING:
    from ablate.backends.testing.suite import CheckResult

_EXAMPLES = """\b
Examples:
  ablate doctor                    everything that this machine's back ends claim
  ablate doctor --backend triton   one back end
  ablate doctor --quick            the short form that stands before every native run
  ablate doctor --json             for scripts; exit code 1 if a check failed
"""


@click.command("doctor", epilog=_EXAMPLES)
@click.option("--backend", "names", multiple=True, help="Only this back end; may be given again.")
@click.option("--device", help="A torch device: cpu, cuda, cuda:1. Default: the first GPU, else the CPU.")
@click.option("--quick", is_flag=True, help="Fewer policies and no training.")
@json_option
@click.pass_context
def command(
    context: click.Context, names: tuple[str, ...], device: str | None, quick: bool, as_json: bool
) -> None:
    """Test the back ends on this machine's device, bit by bit.

    Quantised bits are compared with plain torch on the CPU, products with exact ones. The exact probe finds
    an accumulator that is narrower than fp32 and tells its width. Then come the gain of stochastic rounding,
    the Hadamard's inverse, and a short training run beside emulation. Exit code 1 if anything failed.
    """
    from ablate.backends.select import load_backend
    from ablate.backends.testing.suite import POLICIES, both, self_test
    from ablate.layers.selftest import trains_like_emulation
    from ablate.run.backends import BUILT_IN, backend_names

    for name in names:
        known_backend(name)
    where, found = chosen_device(device)
    chosen = names or [name for name in backend_names() if name not in ("auto", "reference")]
    results: list[CheckResult] = []
    skipped: dict[str, str] = {}
    if not as_json:
        click.echo(f"{found.name} ({found.arch})")
    for name in chosen:
        try:
            backend = load_backend(name)
        except ValueError as error:
            skipped[name] = str(error)
            continue
        supports = [backend.support(both(policy), found) for policy in POLICIES]
        if all(support.mode == "no" for support in supports):
            formats = [policy.format for policy in POLICIES]
            skipped[name] = supports[formats.index("mxfp4")].detail
            continue
        if not as_json:
            click.echo(f"\n{name}: {backend.detail()}")
        trained = not quick and name != "reference"
        for result in chain(
            self_test(name, where, quick=quick), trains_like_emulation(name, where) if trained else ()
        ):
            results.append(result)
            if not as_json:
                click.echo(f"  {'pass' if result.passed else 'FAIL'}  {result.check}: {result.detail}")
    failed = [result for result in results if not result.passed]
    if as_json:
        content = {"device": asdict(found), "results": [asdict(one) for one in results], "skipped": skipped}
        echo_json(content | {"passed": not failed})
    else:
        click.echo()
        for name, why in skipped.items():
            if name in BUILT_IN or name in names:
                click.echo(f"{name}: not here: {why}")
        click.echo(f"{len(results) - len(failed)} of {len(results)} checks passed.")
    context.exit(1 if failed else 0)
