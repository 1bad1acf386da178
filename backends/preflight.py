"""Checks before a run trains: its back ends support its GEMMs here and pass their self-test.

No check falls back silently. A named back end without support, a required but missing native path, and a
failed self-test each give one line with a remedy.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ablate.backends.select import Choice
    from ablate.run.config import ArmConfig, ResourcesConfig

_TESTED_MODES = ("native", "upcast")


class UnfitDeviceError(ValueError):
    """A run that may not train on this device; the message is for the user."""


def fit_choices(config: ArmConfig, resources: ResourcesConfig, where: str) -> tuple[Choice, ...]:
    """Return the back end of each GEMM of a run on a torch device.

    Raises:
        UnfitDeviceError: a back end without support, a missing native path if required, or no such device.
    """
    from ablate.backends.device import device_of
    from ablate.backends.select import Selection

    try:
        device = device_of(where)
    except (RuntimeError, AssertionError) as error:  # raised by torch for driver and build
        first = str(error).strip().splitlines()[0]
        raise UnfitDeviceError(
            f"no GPU can be used here ({first}); set resources.gpus: 0 to emulate on the CPU"
        ) from None
    try:
        choices = Selection(config.backend).choices(config.recipe, device)
    except ValueError as error:
        raise UnfitDeviceError(f"{error}; backend: auto takes what there is") from None
    if resources.require_native:
        for choice in choices:
            if choice.mode != "native":
                raise UnfitDeviceError(
                    f"require_native: no native {choice.operands} for {choice.gemm.capitalize()} on "
                    f"{device.name} ({choice.detail}); `ablate check` shows what there is, "
                    "require_native: false emulates"
                )
    return choices


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The result of one check, with a detail or the difference."""

    backend: str
    check: str
    passed: bool
    detail: str


@lru_cache(maxsize=64)
def quick_self_test(name: str, where: str) -> tuple[CheckResult, ...]:
    """Return what a back end's checks in short find on a torch device, run once per process."""
    from ablate.backends.select import load_backend
    from ablate.backends.testing.suite import QUICK, checks

    found = []
    for check in checks(load_backend(name), where, QUICK):
        outcome, _ = check.outcome()
        passed = outcome["result"] != "failed"
        found.append(CheckResult(backend=name, check=check.name, passed=passed, detail=outcome["detail"]))
    return tuple(found)


def run_self_tests(choices: tuple[Choice, ...], where: str, *, allow_failed: bool) -> list[dict[str, Any]]:
    """Run the short self-test of every back end other than plain emulation; return the results.

    Raises:
        UnfitDeviceError: a test failed and the study does not allow that.
    """
    tested = [choice.backend for choice in choices if choice.mode in _TESTED_MODES]
    names = [name for name in dict.fromkeys(tested) if name != "emulated"]
    results = [result for name in names for result in quick_self_test(name, where)]
    failed = [result for result in results if not result.passed]
    if failed and not allow_failed:
        first = failed[0]
        raise UnfitDeviceError(
            f"self-test of back end '{first.backend}' failed: {first.check}: {first.detail}; "
            f"`ablate check {where}` tells more, resources.allow_failed_self_test: true trains all the same"
        )
    return [asdict(result) for result in results]
