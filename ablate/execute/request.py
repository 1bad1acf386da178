"""What is asked of the executor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from ablate.run.config import ResourcesConfig, RunConfig
    from ablate.run.diagnostics import Diagnostics


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What the executor needs of one run. ``tokens_dir``: None for a trainer that reads no tokens."""

    run_id: str
    arm: str
    config: RunConfig
    tokens_dir: Path | None
    resources: ResourcesConfig
    diagnostics: Diagnostics | None = None
