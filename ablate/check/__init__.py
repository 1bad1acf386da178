"""``ablate check``: test and time a device, and leave a record of it; test a recipe's or a user's quantiser.

    python -m ablate.check cuda --minutes 10 --out my-gpu

This runs from a plain copy of the folder, and needs only torch, numpy and pydantic, and Triton on a GPU. The
record is JSON (``record.ProofRecord`` is its schema) with a page in Markdown beside it.

How it fails: a broken promise of a back end is a finding of the record and exit code 1; the other parts still
run. A device that cannot be used is a ``UserError``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ablate.backends.device import Device
    from ablate.backends.protocol import Backend

MINUTES = 10.0
"""The time limit, if the user gives none."""
OUT = "ablate-proof"
"""The folder of records, if the user names none."""


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
