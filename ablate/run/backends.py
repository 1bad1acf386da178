"""The names of the back ends: a study, a run's configuration and the choice of a back end ask for them."""

from __future__ import annotations

from importlib.metadata import entry_points

BUILT_IN = {
    "emulated": "ablate.backends.gemms.emulated:EmulatedBackend",
    "reference": "ablate.backends.gemms.reference:ReferenceBackend",
    "torch": "ablate.backends.gemms.torch_scaled:TorchBackend",
    "triton": "ablate.backends.gemms.triton_scaled:TritonBackend",
}
"""Where the class of each back end of the package lies, by its name."""


def backend_names() -> tuple[str, ...]:
    """Return every name that a study may give: auto, the built-in ones, those of entry points."""
    return ("auto", *BUILT_IN, *registered())


def registered() -> dict[str, str]:
    """Return where the back ends of other packages lie, by the name of their entry point."""
    return {one.name: one.value for one in entry_points(group="ablate.backends") if one.name not in BUILT_IN}
