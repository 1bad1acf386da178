"""Where a study is kept and run, for every call that runs one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Where:
    """A storage, a Ray cluster and an MLflow server.

    ``address``: of a Ray cluster; None: Ray on this machine. ``tracking_uri``: of MLflow; None:
    $MLFLOW_TRACKING_URI, else a database in the storage.
    """

    storage: Path
    address: str | None = None
    tracking_uri: str | None = None
