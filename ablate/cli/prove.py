"""``ablate prove``: test and time this machine's device, and leave a record."""

from __future__ import annotations

import click

from ablate.cli.common import device_option, json_option
from ablate.prove import MINUTES, OUT

_EXAMPLES = """\b
Examples:
  ablate prove                              the first GPU, else the CPU, in about ten minutes
  ablate prove --device cpu --minutes 3     what fits into three; the same command goes on with the rest
  ablate prove --out my-gpu --json          for scripts; exit code 1 if a check failed
  python -m ablate.prove                    the same where only torch, triton, numpy and pydantic are
"""


@click.command("prove", epilog=_EXAMPLES)
@device_option
@click.option("--minutes", type=float, default=MINUTES, show_default=True, help="No check begins later.")
@click.option("--out", default=OUT, show_default=True, help="Folder of the record.")
@json_option
@click.pass_context
def command(context: click.Context, device: str | None, minutes: float, out: str, as_json: bool) -> None:
    """Test this machine's device bit by bit, time it, and leave a record.

    Quantised bits are compared with plain torch on the CPU, products with exact ones. The exact probe finds
    an accumulator that is narrower than fp32. Then come gradients, a short training run beside emulation,
    the quantiser's bandwidth, rates of GEMMs and times of training steps. Record (JSON) and page (Markdown)
    lie in --out, with the smallest tensors that show a failure. What did not fit the time is run by the same
    command once more. Exit code 1 if a check failed.
    """
    from ablate.prove.command import main

    context.exit(main(device, minutes, out, as_json=as_json))
