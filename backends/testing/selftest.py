"""The self-test before native training: the conformance suite on the real device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ablate.backends.select import load_backend
from ablate.backends.testing.suite import POLICIES, QUICK, checks

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one check, with a detail or the difference."""

    backend: str
    check: str
    passed: bool
    detail: str


def self_test(name: str, where: str, *, quick: bool = False) -> Iterator[Result]:
    """Run a back end's checks on a torch device, one by one. A check that raises counts as failed."""
    for check in checks(load_backend(name), where, QUICK if quick else POLICIES):
        try:
            passed, detail = True, check.run()
        except AssertionError as error:
            passed, detail = False, str(error)
        except Exception as error:  # the self-test is meant to find errors of drivers and compilers
            passed, detail = False, in_short(error)
        yield Result(backend=name, check=check.name, passed=passed, detail=detail)


def in_short(error: Exception) -> str:
    """Return an error's type and its first line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"


@lru_cache(maxsize=64)
def quick_self_test(name: str, where: str) -> tuple[Result, ...]:
    """Return the results of the short form, run once per process."""
    return tuple(self_test(name, where, quick=True))
