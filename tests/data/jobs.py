"""Jobs for the tests of workers: they run in another process, which imports them from here."""

import os
import time
from pathlib import Path

from ablate.base.errors import Problem, UserError


def wait_and_square(number, seconds, report):
    report(1)
    time.sleep(seconds)
    report(2)
    return number**2, os.getpid()


def refuse(line, report):
    report(1)
    raise UserError(Problem(file="shard.json.gz", line=line, what="is damaged", hint="fetch it again"))


def no_space(report):
    report(1)
    raise OSError(28, "No space left on device", "train.bin")


def die(report):
    report(1)
    os.kill(os.getpid(), 9)


def work_for_ever(folder, report):
    (Path(folder) / str(os.getpid())).touch()
    while True:
        report(1)
        time.sleep(0.02)
