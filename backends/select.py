"""Choose the back end of each GEMM of a recipe: by name, or ``auto``: the fastest native one, else emulation.

Nothing falls back silently. The run's record holds the choice for every GEMM with its reason. A named
back end rejects a GEMM that it does not support, and ``require_native`` rejects a run without a native one.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ablate.backends.device import device_of
from ablate.backends.protocol import Support
from ablate.base.errors import one_of
from ablate.recipes import GEMMS, LayerRecipe, describe_gemm
from ablate.run.backends import BUILT_IN, backend_names, registered

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ablate.backends.device import Device
    from ablate.backends.protocol import Backend
    from ablate.recipes import Gemm, GemmPolicy, Recipe

FASTEST_FIRST = ("torch", "triton")
"""The order in which ``auto`` tries native back ends: the vendor's library, then our kernel."""


@lru_cache(maxsize=32)
def load_backend(name: str) -> Backend:
    """Return the back end with this name.

    Raises:
        ValueError: the name is unknown, or the back end cannot be imported.
    """
    where = BUILT_IN.get(name) or registered().get(name)
    if where is None:
        raise ValueError(f"no back end '{name}' (expected {one_of(backend_names())})")
    module, _, attribute = where.partition(":")
    try:
        made: Backend = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"back end '{name}' ({where}) does not import: {error}") from None
    return made


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
        if name not in backend_names():
            raise ValueError(f"no back end '{name}' (expected {one_of(backend_names())})")
        self.name = name
        self._chosen: dict[tuple[GemmPolicy, str], Backend] = {}

    def of(self, gemm: GemmPolicy, where: str) -> Backend:
        """Return the back end of a GEMM on a torch device; raise as ``choose``."""
        found = self._chosen.get((gemm, where))
        if found is None:
            found = self._chosen[gemm, where] = self.choose(gemm, device_of(where))[0]
        return found

    def choose(self, gemm: GemmPolicy, device: Device) -> tuple[Backend, Support]:
        """Return the back end of a GEMM on a device, and its support.

        Raises:
            ValueError: the named back end does not support it.
        """
        emulated = load_backend("emulated")
        if gemm.accumulate == "blackwell":
            return self._modelled(gemm, device)
        if self.name == "auto":
            for name in (*FASTEST_FIRST, *registered()):
                backend = load_backend(name)
                support = backend.support(gemm, device)
                if support.mode == "native":
                    return backend, support
            return emulated, emulated.support(gemm, device)
        # A GEMM without quantised operands is the device's own; only the reference back end does it itself.
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

    def _modelled(self, gemm: GemmPolicy, device: Device) -> tuple[Backend, Support]:
        """Return the back end that adds as a model of Blackwell does; a device adds in its own way."""
        from ablate.backends.blackwell import BlackwellEmulated, BlackwellReference

        if self.name not in ("auto", "emulated", "reference"):
            what = f"back end '{self.name}' cannot do {describe_gemm(gemm)}: that is emulated"
            raise ValueError(f"{what} (expected backend auto, emulated or reference)")
        backend: Backend = BlackwellReference() if self.name == "reference" else BlackwellEmulated()
        mode = backend.support(gemm, device).mode
        return backend, Support(mode=mode, detail=backend.detail())

    def choices(self, recipe: Recipe, device: Device) -> tuple[Choice, ...]:
        """Choose, as ``choose``, for each GEMM of a recipe, its rules and its phases, without duplicates."""
        found = []
        for where, gemm, policy in gemms_of(recipe):
            backend, support = self.choose(policy, device)
            found.append(
                Choice(
                    gemm=f"{gemm}{where}", operands=describe_gemm(policy), backend=backend.name,
                    mode=support.mode, detail=support.detail,
                )
            )  # fmt: skip
        return tuple(found)


def gemms_of(recipe: Recipe) -> Iterator[tuple[str, Gemm, GemmPolicy]]:
    """Yield (suffix that names the rule or phase, GEMM, policy) for every GEMM that a recipe can run."""
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
    """Return native if every GEMM is native, else the least native mode among them."""
    modes = {choice.mode for choice in choices}
    return next((mode for mode in ("reference", "emulated", "upcast") if mode in modes), "native")
