"""MLflow's web application on sockets that are open already: ``python -m ablate.track.pages DESCRIPTOR...``.

``mlflow server`` prints the host name under which it answers, which is a key here. It opens one address
alone, and lets each of its users put artifacts into any folder of the person who started it. So this program
starts the same application itself: with artifacts in one folder, and without the parts that run commands or
ask other servers.

How it fails: a database that cannot be opened ends it with a traceback.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

_CLOSED = ("/assistant", "/gateway", "/jobs", "/webhooks")
"""In the paths of what runs commands on this machine, or asks other servers in the owner's name."""
_LEADS_ELSEWHERE = ("runs", "models", "mlflow-artifacts")
"""Schemes of addresses that MLflow turns into other addresses, which are checked in their turn."""


def keep_artifacts_in(root: Path) -> None:
    """Let MLflow in this process neither read nor write artifacts outside of ``root``."""
    from mlflow.exceptions import MlflowException
    from mlflow.store.artifact.artifact_repository_registry import (
        ArtifactRepositoryRegistry,
    )
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    open_any = ArtifactRepositoryRegistry.get_artifact_repository
    create_any = SqlAlchemyStore.create_experiment
    refusal = MlflowException.invalid_parameter_value(
        "this server keeps artifacts in its own folder alone"
    )

    def open_inside(
        registry: Any, artifact_uri: str, *arguments: Any, **options: Any
    ) -> Any:
        address = urlparse(artifact_uri)
        path = Path(unquote(address.path)).resolve()
        is_inside = (
            address.scheme in ("", "file")
            and not address.netloc
            and path.is_relative_to(root)
        )
        if not is_inside and address.scheme not in _LEADS_ELSEWHERE:
            raise refusal
        return open_any(registry, artifact_uri, *arguments, **options)

    def create_inside(
        store: Any,
        name: str,
        artifact_location: str | None = None,
        tags: Any = None,
    ) -> Any:
        if artifact_location:
            raise refusal
        return create_any(store, name, None, tags)

    ArtifactRepositoryRegistry.get_artifact_repository = open_inside
    SqlAlchemyStore.create_experiment = create_inside


def main() -> None:
    """Serve $MLFLOW_BACKEND_STORE_URI, with artifacts in $ABLATE_ARTIFACTS, until SIGTERM."""
    import uvicorn  # before mlflow.server, which secures itself only if it sees that it is served

    database = os.environ["MLFLOW_BACKEND_STORE_URI"]
    root = Path(os.environ["ABLATE_ARTIFACTS"])
    from mlflow import server
    from mlflow.server import handlers
    from mlflow.server.fastapi_app import app
    from starlette.responses import PlainTextResponse

    os.environ |= {
        server.BACKEND_STORE_URI_ENV_VAR: database,
        server.ARTIFACT_ROOT_ENV_VAR: "mlflow-artifacts:/",
        server.ARTIFACTS_DESTINATION_ENV_VAR: root.as_uri(),
        server.SERVE_ARTIFACTS_ENV_VAR: "true",
    }
    keep_artifacts_in(root)
    handlers.initialize_backend_stores(database, database, "mlflow-artifacts:/")

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        is_closed = scope["type"] == "http" and any(
            part in scope["path"] for part in _CLOSED
        )
        answer = PlainTextResponse("not served here", 404) if is_closed else app
        await answer(scope, receive, send)

    sockets = [socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[1:]]
    uvicorn.Server(uvicorn.Config(guarded)).run(sockets=sockets)


if __name__ == "__main__":
    main()
