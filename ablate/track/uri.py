"""The address of the MLflow store that a study is mirrored to."""

from __future__ import annotations

import os
from pathlib import Path

from ablate.base.command_hints import redact
from ablate.base.errors import UserError

DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
"""Schemes of databases, for which this package starts MLflow's server."""


def scheme(uri: str) -> str:
    """Return ``postgresql`` for ``postgresql+psycopg2://…``, and an empty text for a path."""
    head, separator, _ = uri.partition(":")
    return head.partition("+")[0].lower() if separator else ""


def is_database(uri: str) -> bool:
    """Whether the address is a database, whose pages need a server started by this package."""
    return scheme(uri) in DATABASES


def is_http(uri: str) -> bool:
    """Whether the address is an MLflow server."""
    return scheme(uri) in ("http", "https")


def sqlite_path(uri: str) -> Path | None:
    """Return the file of a sqlite address, None for any other address."""
    return Path(uri.split(":///", 1)[1]) if scheme(uri) == "sqlite" and ":///" in uri else None


def default_tracking_uri(storage: Path) -> str:
    """Return the address of the store in the studies' storage."""
    return f"sqlite:///{storage.resolve() / 'mlflow.db'}"


def resolve_tracking_uri(storage: Path, option: str | None = None) -> str:
    """Return the option, else $MLFLOW_TRACKING_URI, else the default; relative sqlite paths become absolute.

    Raises:
        UserError: a plain folder or ``file:``, which MLflow refuses.
    """
    uri = option or os.environ.get("MLFLOW_TRACKING_URI") or default_tracking_uri(storage)
    if scheme(uri) in ("", "file") and uri not in ("databricks", "uc"):
        raise UserError(
            f"MLflow keeps no runs in plain files: '{redact(uri)}' "
            "(expected http(s)://host:port or sqlite:///path/to/mlflow.db)"
        )
    path = sqlite_path(uri)
    return f"sqlite:///{path.resolve()}" if path else uri
