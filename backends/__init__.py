"""Back ends: who quantises and multiplies. All give the quantised bits of ``ablate.numerics``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ablate.backends.protocol import Backend

__all__ = ["get_backend"]


def get_backend(name: str) -> Backend:
    """Return the back end of that name; ``auto`` takes the fastest that this machine has.

    Raises:
        ValueError: no back end of that name.
    """
    if name in ("auto", "emulated"):
        from ablate.backends.emulated import EmulatedBackend

        return EmulatedBackend()
    if name == "reference":
        from ablate.backends.reference import ReferenceBackend

        return ReferenceBackend()
    raise ValueError(f"no back end '{name}' (expected auto, emulated or reference)")
