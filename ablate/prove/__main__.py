"""``python -m ablate.prove``: the same as ``ablate prove``, without click."""

from __future__ import annotations

import argparse
import sys

from ablate.base.errors import UserError, safe_text
from ablate.prove import MINUTES, OUT
from ablate.prove.command import main

DESCRIPTION = (
    "Test this machine's device bit by bit, time it, and leave a record: JSON, and a page in Markdown. "
    "The same command goes on where the time limit ended it. Exit code 1 if a check failed."
)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ablate.prove", description=DESCRIPTION)
    parser.add_argument("--device", help="a torch device: cpu, cuda; default: the first GPU, else the CPU")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"default: {MINUTES}")
    parser.add_argument("--out", default=OUT, help=f"folder of the record; default: {OUT}")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print the record")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main(**vars(_arguments())))
    except KeyboardInterrupt:
        sys.exit(130)
    except UserError as error:
        sys.stderr.write(safe_text(str(error), keep="\n") + "\n")
        sys.exit(2)
