"""Who does each GEMM of a recipe: by name, or ``auto``, the fastest native one and else emulation.

Nothing falls back in silence: the choice for every GEMM, with its reason, is in the run's record; a back end
asked for by name that cannot do a GEMM refuses it; and ``require_native`` refuses to start without one.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ablate.backends.device import device_of
from ablate.recipes import GEMMS, LayerRecipe, describe_gemm
from ablate.run.backends import BUILT_IN, backend_names, registered

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ablate.backends.device import Device
    from ablate.backends.protocol import Backend, Support
    from ablate.recipes import Gemm, GemmPolicy, Recipe

FASTEST_FIRST = ("torch", "triton")
"""What ``auto`` asks for a native GEMM, in this order: the vendor's library, then our kernel."""


@lru_cache(maxsize=32)
def load_backend(name: str) -> Backend:
    """Return the back end of that name.

    Raises:
        ValueError: no back end of that name, or one that does not import.
    """
    where = BUILT_IN.get(name) or registered().get(name)
    if where is None:
        raise ValueError(f"no back end '{name}' (expected {_listed(backend_names())})")
    module, _, attribute = where.partition(":")
    try:
        made: Backend = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"back end '{name}' ({where}) does not import: {error}") from None
    return made


def _listed(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Who does one GEMM of a recipe, and how."""

    gemm: str
    operands: str
    backend: str
    mode: str
    detail: str


class Selection:
    """The back end of each GEMM policy, chosen on first use for the device it runs on."""

    def __init__(self, name: str = "auto") -> None:
        if name not in backend_names():
            raise ValueError(f"no back end '{name}' (expected {_listed(backend_names())})")
        self.name = name
        self._chosen: dict[tuple[GemmPolicy, str], Backend] = {}

    def of(self, gemm: GemmPolicy, where: str) -> Backend:
        """Return who does a GEMM on a torch device.

        Raises:
            ValueError: the back end that was asked for cannot.
        """
        found = self._chosen.get((gemm, where))
        if found is None:
            found = self._chosen[gemm, where] = self.choose(gemm, device_of(where))[0]
        return found

    def choose(self, gemm: GemmPolicy, device: Device) -> tuple[Backend, Support]:
        """Return who does a GEMM on a device, and how.

        Raises:
            ValueError: the back end that was asked for cannot.
        """
        emulated = load_backend("emulated")
        if self.name == "auto":
            for name in (*FASTEST_FIRST, *registered()):
                backend = load_backend(name)
                support = backend.support(gemm, device)
                if support.mode == "native":
                    return backend, support
            return emulated, emulated.support(gemm, device)
        # What is not quantised is no back end's business but the reference's: the device's own GEMM.
        untouched = all(one.is_high_precision and not one.hadamard for one in (gemm.left, gemm.right))
        if untouched and self.name != "reference":
            return emulated, emulated.support(gemm, device)
        backend = load_backend(self.name)
        support = backend.support(gemm, device)
        if support.mode == "no":
            raise ValueError(
                f"back end '{self.name}' cannot do {describe_gemm(gemm)} on {device.name}: {support.detail}"
            )
        return backend, support

    def choices(self, recipe: Recipe, device: Device) -> tuple[Choice, ...]:
        """Return who does each GEMM of a recipe, of its rules and phases too; equal ones once.

        Raises:
            ValueError: the back end that was asked for cannot.
        """
        found = []
        for where, gemm, policy in gemms_of(recipe):
            backend, support = self.choose(policy, device)
            found.append(
                Choice(
                    gemm=f"{gemm}{where}",
                    operands=describe_gemm(policy),
                    backend=backend.name,
                    mode=support.mode,
                    detail=support.detail,
                )
            )
        return tuple(found)


def gemms_of(recipe: Recipe) -> Iterator[tuple[str, Gemm, GemmPolicy]]:
    """Yield (where it differs from the rest, GEMM, policy) for every GEMM that a recipe can run."""
    parts: list[tuple[str, LayerRecipe]] = [("", recipe)]
    parts += [(f" by rule {number}", rule.recipe) for number, rule in enumerate(recipe.rules, 1)]
    parts += [(f" in phase {number}", phase.recipe) for number, phase in enumerate(recipe.phases, 1)]
    seen = set()
    for where, part in parts:
        for gemm in GEMMS:
            if (gemm, part.gemm(gemm)) not in seen:
                seen.add((gemm, part.gemm(gemm)))
                yield where, gemm, part.gemm(gemm)


def overall_mode(choices: Iterable[Choice]) -> str:
    """Return native if every GEMM is; else the least native of theirs."""
    modes = {choice.mode for choice in choices}
    return next((mode for mode in ("reference", "emulated", "upcast") if mode in modes), "native")
