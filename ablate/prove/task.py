"""What a part of the proof is made of: tasks, each with one finding, on what is to be tested."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ablate.backends.select import load_backend
from ablate.backends.testing.suite import POLICIES, both
from ablate.run.backends import backend_names

if TYPE_CHECKING:
    from ablate.backends.device import Device
    from ablate.backends.protocol import Backend


@dataclass(frozen=True, kw_only=True)
class Told:
    """A fact or a measurement, which cannot fail: a line, and figures whose names end with their units."""

    detail: str
    figures: dict[str, float] = field(default_factory=dict)


class Skip(Exception):  # noqa: N818  no error
    """Raised by a task that cannot run here; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One check of a back end, or of the device where ``backend`` is empty.

    ``run`` returns a line for a check that passed, or what it measured. It raises ``AssertionError`` for a
    broken promise and ``Skip`` for what cannot be tested here; any other exception counts as a failure.
    """

    backend: str = ""
    name: str
    run: Callable[[], str | Told]


def skipped(name: str, why: str, backend: str = "") -> Task:
    """Return a task that says why there is nothing to test."""

    def run() -> str:
        raise Skip(why)

    return Task(backend=backend, name=name, run=run)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A torch device, what it is, the back ends that claim it, and why others do not."""

    where: str
    device: Device
    backends: dict[str, Backend]
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.kind != "cpu"


Tasks = Callable[[Setup], Iterator[Task]]
"""A part: it yields its tasks in the same order each time, and does no work between them."""


def setup_of(where: str, device: Device) -> Setup:
    """Ask every back end but the reference, with which they are compared, whether it claims the device."""
    claim: dict[str, Backend] = {}
    refused: dict[str, str] = {}
    for name in backend_names():
        if name in ("auto", "reference"):
            continue
        try:
            backend = load_backend(name)
        except ValueError as error:
            refused[name] = str(error)
            continue
        supports = [backend.support(both(policy), device) for policy in POLICIES]
        if any(one.mode != "no" for one in supports):
            claim[name] = backend
        else:
            refused[name] = supports[[policy.format for policy in POLICIES].index("mxfp4")].detail
    return Setup(where=where, device=device, backends=claim, refused=refused)
