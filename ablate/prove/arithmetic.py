"""The parts that the conformance suite makes up: bits, probes, products, gain of SR, the Hadamard.

The bits of a few policies come first, those of all others in a part of their own: on a GPU each policy has
kernels of its own, which take minutes to compile.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ablate.backends.testing.suite import POLICIES, QUICK, checks
from ablate.prove.task import Setup, Task, Tasks, Told

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.backends.testing.suite import Check
    from ablate.recipes import OperandPolicy


_TOLD = ("accumulator", "rounding of sums")
"""Properties of the hardware, which are no promise of a back end."""


def _part(*kinds: str, policies: tuple[OperandPolicy, ...] = POLICIES) -> Tasks:
    def tasks(setup: Setup) -> Iterator[Task]:
        for name, backend in setup.backends.items():
            for check in checks(backend, setup.where, policies):
                if check.kind in kinds:
                    named = check.of if len(kinds) == 1 else check.name
                    run = partial(_told, check) if check.kind in _TOLD else check.run
                    yield Task(backend=name, name=named, run=run)

    return tasks


def _told(check: Check) -> Told:
    return Told(detail=check.run())


ARITHMETIC: dict[str, Tasks] = {
    "quantised bits": _part("quantised bits", policies=QUICK),
    "exact probe": _part("exact probe", "accumulator", "rounding of sums"),
    "products": _part("product"),
    "gain of SR": _part("stochastic gain"),
    "Hadamard": _part("Hadamard cancels in the product"),
}
"""These parts by name."""

other_bits = _part("quantised bits", policies=tuple(one for one in POLICIES if one not in QUICK))
"""The quantised bits of all other policies."""
