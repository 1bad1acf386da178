"""A made-up search in a process of its own, killed at a write of its journal; prints its trials at the end.

python killed_search.py SEARCH FOLDER OPERATION        OPERATION 0: not killed
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from pathlib import Path

from made_up import SEARCHES

from ablate.search.engine import open_storage


def die_at(operation):
    """Be killed just before the n-th write or fsync from now on."""
    count = itertools.count(1)

    def counted(function):
        def call(*arguments):
            if next(count) == operation:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments)

        return call

    os.write, os.fsync = map(counted, (os.write, os.fsync))


def main():
    name, folder, operation = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])

    def logged(run):
        def call(asked):
            with (folder / "ran.txt").open("a") as file:
                file.writelines(f"{one.group.name} {one.trial.number}\n" for one in asked)
            return run(asked)

        return call

    storage = open_storage(None, folder)
    die_at(operation)
    print(json.dumps(SEARCHES[name](storage, logged)))


if __name__ == "__main__":
    main()
