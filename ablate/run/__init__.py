"""What one run is: its configuration, identity, schedule and end; and the names of back ends."""

from __future__ import annotations

from importlib.metadata import entry_points

BUILT_IN = {
    "emulated": "ablate.backends.emulated:EmulatedBackend",
    "reference": "ablate.backends.reference:ReferenceBackend",
    "torch": "ablate.backends.scaled:TorchBackend",
    "triton": "ablate.backends.scaled:TritonBackend",
}
"""The import path of each built-in back end's class, by name."""


def backend_names() -> tuple[str, ...]:
    """List every valid name: auto, the built-in back ends, then those of entry points."""
    return ("auto", *BUILT_IN, *registered())


def registered() -> dict[str, str]:
    """Map other packages' entry points to import paths of their back ends, without built-in names."""
    points = entry_points(group="ablate.backends")
    return {point.name: point.value for point in points if point.name not in BUILT_IN}
