"""Choose the back end of each GEMM of a recipe: by name, or ``auto``: the fastest native one, else emulation.

Nothing falls back silently. The run's record holds the choice for every GEMM with its reason. A named
back end rejects a GEMM that it does not support, ``require_native`` a run without a native one, and a failed
self-test every native run, and every emulated one on a GPU.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate.backends.device import device_of, driver_version, triton_build
from ablate.base.errors import first_line, one_of
from ablate.base.files import (
    changed_by_others,
    hash_of,
    hash_of_sources,
    read_record,
    write_record,
)
from ablate.recipes import GEMMS, OperandPolicy, describe_gemm
from ablate.run import BUILT_IN, backend_names, registered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ablate.backends.device import Device
    from ablate.backends.protocol import Backend, Support
    from ablate.recipes import GemmPolicy, Recipe
    from ablate.run.config import ArmConfig, ResourcesConfig

FASTEST_FIRST = ("torch", "triton")
"""The order in which ``auto`` tries native back ends: the vendor's library, then our kernel."""


@lru_cache(maxsize=32)
def load_backend(name: str) -> Backend:
    """Import and make the back end with this name, once per process.

    Raises:
        ValueError: the name is unknown, or the back end cannot be imported.
    """
    entry = BUILT_IN.get(name) or registered().get(name)
    if entry is None:
        raise ValueError(f"no back end '{name}' (expected {one_of(backend_names())})")
    module, _, attribute = entry.partition(":")
    try:
        backend: Backend = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"back end '{name}' ({entry}) does not import: {error}"
        ) from None
    return backend


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The back end of one GEMM of a recipe, and its mode."""

    gemm: str
    operands: str
    backend: str
    mode: str
    detail: str


class Selection:
    """The back end of each GEMM policy, chosen on first use for its device."""

    def __init__(self, name: str = "auto") -> None:
        if name != "auto":
            load_backend(name)  # refuses an unknown name
        self.name = name
        self._chosen: dict[tuple[GemmPolicy, str], Backend] = {}

    def of(self, gemm: GemmPolicy, where: str) -> Backend:
        """Choose the back end of a GEMM on a torch device, once; errors as ``choose``."""
        if (gemm, where) not in self._chosen:
            self._chosen[gemm, where], _ = self.choose(gemm, device_of(where))
        return self._chosen[gemm, where]

    def choose(self, gemm: GemmPolicy, device: Device) -> tuple[Backend, Support]:
        """Choose the back end of a GEMM on a device; return it and its support.

        Raises:
            ValueError: the named back end does not support it.
        """
        name = self.name
        if gemm.accumulate != "fp32":
            return self._modelled(gemm, device)
        if name == "auto":
            for candidate in (*FASTEST_FIRST, *registered()):
                support = load_backend(candidate).support(gemm, device)
                if support.mode == "native":
                    return load_backend(candidate), support
            name = "emulated"
        # A GEMM without quantised operands is the device's own; only the reference back end does it itself.
        is_plain = all(
            side.is_high_precision and not side.hadamard for side in gemm.sides
        )
        backend = load_backend("emulated" if is_plain and name != "reference" else name)
        support = backend.support(gemm, device)
        if support.mode == "no":
            raise ValueError(
                f"back end '{name}' cannot do {describe_gemm(gemm)} on {device.name}: {support.detail}"
            )
        if backend.name != name and not gemm.is_untouched:
            detail = (
                f"{support.detail}: back end '{name}' takes no {describe_gemm(gemm)}"
            )
            support = replace(support, detail=detail)
        return backend, support

    def _modelled(self, gemm: GemmPolicy, device: Device) -> tuple[Backend, Support]:
        """Choose the emulation of a device's sums: another device adds in its own way."""
        from ablate.backends.modelled_sums import ModelledBackend

        if self.name not in ("auto", "emulated"):
            message = f"back end '{self.name}' cannot do {describe_gemm(gemm)}: that is emulated"
            raise ValueError(f"{message} (expected backend auto or emulated)")
        backend = ModelledBackend(gemm)
        support = backend.support(gemm, device)
        return backend, replace(support, detail=backend.detail())

    def choices(self, recipe: Recipe, device: Device) -> tuple[Choice, ...]:
        """Choose for each GEMM of a recipe, its rules and phases; a repeated policy gives no new choice."""
        places = [""]
        places += [f" by rule {number + 1}" for number in range(len(recipe.rules))]
        places += [f" in phase {number + 1}" for number in range(len(recipe.phases))]
        choices: dict[tuple[str, GemmPolicy], Choice] = {}
        for place, part in zip(places, recipe.parts, strict=True):
            for gemm in GEMMS:
                policy = part.gemm(gemm)
                if (gemm, policy) not in choices:
                    backend, support = self.choose(policy, device)
                    choices[gemm, policy] = Choice(
                        gemm=f"{gemm}{place}",
                        operands=describe_gemm(policy),
                        backend=backend.name,
                        mode=support.mode,
                        detail=support.detail,
                    )
        return tuple(choices.values())


def overall_mode(choices: Iterable[Choice]) -> str:
    """Return native if every GEMM is native, else the least native mode among them."""
    modes = {choice.mode for choice in choices}
    return next(
        (mode for mode in ("reference", "emulated", "upcast") if mode in modes),
        "native",
    )


class UnfitDeviceError(ValueError):
    """The run cannot train on this device; the message is for the user."""


def fit_choices(
    config: ArmConfig, resources: ResourcesConfig, where: str
) -> tuple[Choice, ...]:
    """Choose the back end of each GEMM of a run on a torch device.

    Raises:
        UnfitDeviceError: a back end without support, a missing native path if required, or no such device.
    """
    try:
        device = device_of(where)
    except (RuntimeError, AssertionError) as error:
        # raised by torch for driver and build
        message = f"no GPU can be used here ({first_line(error)})"
        raise UnfitDeviceError(
            f"{message}; set resources.gpus: 0 to emulate on the CPU"
        ) from None
    try:
        choices = Selection(config.backend).choices(config.recipe, device)
    except ValueError as error:
        raise UnfitDeviceError(f"{error}; backend: auto takes what there is") from None
    for choice in choices:
        if resources.require_native and choice.mode != "native":
            raise UnfitDeviceError(
                f"require_native: no native {choice.operands} for {choice.gemm.capitalize()} on "
                f"{device.name} ({choice.detail}); `ablate check backends` shows what there is, "
                "require_native: false emulates"
            )
    return choices


@lru_cache(maxsize=64)
def quick_self_test(
    name: str,
    where: str,
    policies: tuple[OperandPolicy, ...] = (),
    kinds: tuple[str, ...] = (),
) -> tuple[dict[str, Any], ...]:
    """Run a back end's short checks on a torch device, once per process.

    ``policies`` and ``kinds`` of checks: none stands for the short form's policies, and for all kinds. Each
    result has ``backend``, ``check``, ``passed``, ``detail`` (what was found, or the difference) and
    ``figures`` if there are any.
    """
    from ablate.backends.testing.inputs import QUICK
    from ablate.backends.testing.suite import checks

    results = []
    for check in checks(load_backend(name), where, policies or QUICK):
        if kinds and check.kind not in kinds:
            continue
        outcome, _ = check.outcome()
        passed = outcome.pop("result") != "failed"
        results.append(
            {"backend": name, "check": check.name, "passed": passed, **outcome}
        )
    return tuple(results)


_TESTED_ROOMS = ("backends", "numerics", "recipes")
_OF_EMULATION = ("quantised bits", "accumulator")
"""What is tested of emulation: its GEMM is the device's own in bf16."""


def run_self_tests(
    config: ArmConfig, where: str, *, allow_failed: bool
) -> list[dict[str, Any]]:
    """Test the run's policies in every native back end, and on a GPU in emulation; return the results.

    Raises:
        UnfitDeviceError: a test failed and the study does not allow that.
    """
    results: list[dict[str, Any]] = []
    for name, policies in _policies_to_test(config, where).items():
        kinds = _OF_EMULATION if name == "emulated" else ()
        test = partial(quick_self_test, name, where, policies, kinds)
        if name in BUILT_IN:
            results += known_or_tested((name, policies), where, _TESTED_ROOMS, test)
        else:  # sources of others are not known
            results += test()
    for result in results:
        if result["passed"] or allow_failed:
            continue
        other = ""
        if result["backend"] == "emulated":
            other = f"backend: reference or another Triton than {triton_build()} may have the right bits, "
        raise UnfitDeviceError(
            f"self-test of back end '{result['backend']}' failed: {result['check']}: {result['detail']}; "
            f"{other}`ablate check device {where}` tells more, "
            "resources.allow_failed_self_test: true trains anyway"
        )
    return results


def _policies_to_test(
    config: ArmConfig, where: str
) -> dict[str, tuple[OperandPolicy, ...]]:
    """Find the run's policies by the back end that quantises them, without those that need no test.

    bf16 is always among them: its products show the accumulator of the device's GEMM.
    """
    device = device_of(where)
    selection = Selection(config.backend)
    by_backend: dict[str, dict[OperandPolicy, None]] = {}
    for part in config.recipe.parts:
        for gemm in map(part.gemm, GEMMS):
            backend, support = selection.choose(gemm, device)
            is_emulated_on_gpu = support.mode == "emulated" and device.kind != "cpu"
            if support.mode not in ("native", "upcast") and not is_emulated_on_gpu:
                continue
            policies = by_backend.setdefault(backend.name, {OperandPolicy(): None})
            for side in gemm.sides:
                policy = replace(side, source="high_precision")
                if not policy.is_untouched:
                    policies[policy] = None
    return {name: tuple(policies) for name, policies in by_backend.items()}


def known_or_tested(
    decisive: object,
    where: str,
    rooms: tuple[str, ...],
    test: Callable[[], Sequence[dict[str, Any]]],
) -> Sequence[dict[str, Any]]:
    """Read what a test found that passed under equal conditions, from the user's cache; or test.

    ``decisive``: what was tested; its ``repr`` counts, beside the device, the versions of what drives it and
    the sources of these ``rooms``. A record that is damaged, or that others can change, counts as none.
    """
    import torch

    from ablate.backends.cpu_build import folder

    versions = (
        driver_version(),
        torch.__version__,
        torch.version.cuda,
        torch.version.hip,
        triton_build(),
    )
    sources = hash_of_sources(Path(str(files("ablate"))), rooms)
    conditions = repr((decisive, device_of(where), versions, sources))
    path = folder("self-tests")[0] / f"{hash_of(conditions.encode())}.json"
    with suppress(OSError, ValueError):
        if changed_by_others(path) is None:
            known: list[dict[str, Any]] = read_record(path)["results"]
            return known
    results = test()
    if all(result["passed"] for result in results):
        with suppress(OSError):
            write_record(path, {"results": list(results)})
    return results
