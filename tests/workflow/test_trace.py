"""The way of a study through the project's modules, from ``ablate run`` to the driver.

How it counts. ``sys.setprofile`` reports every call of a function, from the moment when the verb's own
function is called with its options. The caller is the nearest frame below that belongs to the project, so
that what ``contextlib`` or a decorator calls counts for whoever asked for it. A *stop* is a module that is
called from ``ablate.cli`` or ``ablate.workflow``; whatever it calls in turn belongs to its stop, and it is
left when one of the two calls another module. The verb's module is the first stop and the driver the last.
Not counted are calls within one module, imports, the listener, which is told what happens and answers
nothing, and what says how to go on after Ctrl-C, which no study passes through.

The order of the rooms is ``WAY``: what is asked for is read and planned before anything is opened, and then
the layout's order holds, from the back ends to the executor. ``workflow.prepare`` leads from ``backends`` to
``data``, so the two leading rooms have no place in that order of their own.

A study that tunes its arms or has a stop rule, and the address of a cluster, make further stops.
"""

from __future__ import annotations

import shutil
import sys
from types import SimpleNamespace

from click.testing import CliRunner

from ablate.cli import cli
from tests.workflow.fakes import STUDY, TEXT

LEADERS = ("ablate.cli", "ablate.workflow")
LISTENERS = {"ablate.cli.display", "ablate.workflow", "ablate.cli.common", "ablate.base.command_hints"}
WAY = ("study", "plan", "store", "backends", "data", "track", "execute")


class Trace:
    """Notes the stops from the call of the verb to the driver."""

    def __init__(self):
        self.stops = []

    def __call__(self, frame, event, _argument):
        name = frame.f_code.co_name
        if event != "call" or name == "<module>" or self.stops[-1:] == ["ablate.execute.driver"]:
            return
        module = module_of(frame)
        if not self.stops:
            self.stops = [module] if (module, name) == ("ablate.cli.run", "command") else []
            return
        caller = frame.f_back
        while caller is not None and not module_of(caller).startswith("ablate."):
            caller = caller.f_back
        leader = "" if caller is None or caller.f_code.co_name == "<module>" else module_of(caller)
        counts = module.startswith("ablate.") and not {module, leader} & LISTENERS
        if counts and leader.startswith(LEADERS) and module not in (leader, self.stops[-1]):
            self.stops.append(module)


def module_of(frame):
    return frame.f_globals.get("__name__", "")


def test_the_way_of_a_study_from_the_command_to_the_driver(tmp_path, monkeypatch):
    from ablate.execute import driver
    from ablate.execute.queue import ExecutionEnd

    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "tiny.yaml").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    # The mirror's process is no part of the way: it ends at once.
    monkeypatch.setattr("ablate.track.process.sys", SimpleNamespace(executable=shutil.which("true")))
    trace, asked = Trace(), []

    def execute_study(_store, runs, **_options):
        trace.stops.append("ablate.execute.driver")
        asked.extend(runs)
        return ExecutionEnd(states={}, interrupted=True)

    monkeypatch.setattr(driver, "execute_study", execute_study)
    sys.setprofile(trace)
    try:
        done = CliRunner().invoke(
            cli, ["run", "tiny.yaml", "--storage", "runs"], standalone_mode=False, catch_exceptions=False
        )
    finally:
        sys.setprofile(None)
    assert done.return_value == 130, done.output
    assert len(asked) == 4
    assert len(trace.stops) <= 12, trace.stops
    assert len(set(trace.stops)) == len(trace.stops), trace.stops
    rooms = [stop.split(".")[1] for stop in trace.stops if not stop.startswith(LEADERS)]
    assert list(dict.fromkeys(rooms)) == list(WAY), trace.stops
    assert rooms == sorted(rooms, key=WAY.index), trace.stops
