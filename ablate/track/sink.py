"""The only module that talks to MLflow: its calls, its limits and its kinds of failure.

How it fails: ``Refused`` concerns one run (it was deleted, or has a value that MLflow does not take): the
others continue. ``Away`` concerns the whole store (no answer, a 5xx, a locked database): the caller stops and
tries again later. MLflow's error texts can contain the address with its password, so they are redacted here
first.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ablate.track.database import make_database
from ablate.track.uri import is_database, redact, sqlite_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from ablate.track.rows import Point

MLFLOW_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    # The mirror itself retries; MLflow's default is 7 retries of up to 120 s each.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
"""Set before MLflow is imported, unless the user has set them."""

STORE_TAG = "ablate.store"
RUN_TAG = "ablate.run_id"
SUMMARY_TAG = "ablate.summary"
VIEW = "ablate"
"""The name of the view in which the study's page keeps its columns."""

_ENTITIES_PER_BATCH = 1000
_PARAMS_OR_TAGS_PER_BATCH = 100
_ABOUT_ONE_RUN = (
    "RESOURCE_DOES_NOT_EXIST",
    "INVALID_PARAMETER_VALUE",
    "INVALID_STATE",
    "RESOURCE_ALREADY_EXISTS",
)


class Refused(Exception):  # noqa: N818  it reads as what it is
    """MLflow refuses what was sent about one run."""


class Away(Exception):  # noqa: N818  it reads as what it is
    """The tracking store cannot be used now."""


class Sink:
    """MLflow at one address. Nothing is imported or opened before the first call."""

    def __init__(self, tracking_uri: str, storage: Path) -> None:
        self._uri = tracking_uri
        self._artifacts = storage.resolve() / "mlartifacts"
        self._opened: Any = None
        self._artifact_uris: dict[str, str] = {}

    def experiment(self, name: str, store_id: str) -> str:
        """Return the id of the study's experiment.

        A deleted experiment is restored, because its name stays taken. MLflow then restores all of its runs
        too, so this study's go to the bin again and are created anew.
        """
        with _translated():
            client = self._client()
            found = client.get_experiment_by_name(name)
            if found is None:
                # A server chooses the place of artifacts; without a server they lie in the storage.
                place = (self._artifacts / name).as_uri() if is_database(self._uri) else None
                tags = {"mlflow.experimentKind": "custom_model_development"}
                created: str = client.create_experiment(name, artifact_location=place, tags=tags)
                return created
            experiment_id: str = found.experiment_id
            if found.lifecycle_stage != "active":
                client.restore_experiment(experiment_id)
                for run in self._runs(experiment_id, store_id):
                    client.delete_run(run.info.run_id)
            return experiment_id

    def describe(self, experiment_id: str, note: str, view: str) -> None:
        """Replace the experiment's description and the view named in the dashboard's address."""
        with _translated():
            self._client().set_experiment_tag(experiment_id, "mlflow.note.content", note)
            self._client().set_experiment_tag(experiment_id, f"mlflow.sharedViewState.{VIEW}", view)

    def known_runs(self, experiment_id: str, store_id: str) -> dict[str, str]:
        """Return MLflow's ids of the study's runs, by run id (``summary`` for the report)."""
        with _translated():
            runs: dict[str, str] = {}
            for run in self._runs(experiment_id, store_id):
                tags = run.data.tags
                key = "summary" if SUMMARY_TAG in tags else tags.get(RUN_TAG)
                if key:
                    runs[key] = run.info.run_id
            return runs

    def _runs(self, experiment_id: str, store_id: str) -> list[Any]:
        found: list[Any] = []
        token: str | None = None
        while True:
            page = self._client().search_runs(
                [experiment_id],
                filter_string=f"tags.`{STORE_TAG}` = '{store_id}'",
                max_results=1000,
                page_token=token,
            )
            found += page
            token = page.token
            if not token:
                return found

    def create_run(
        self, experiment_id: str, name: str, start_unix: float | None, tags: Mapping[str, str]
    ) -> str:
        """Start an MLflow run and return its id."""
        with _translated():
            run = self._client().create_run(
                experiment_id, start_time=_milliseconds(start_unix), tags=dict(tags), run_name=name
            )
            run_id: str = run.info.run_id
            self._artifact_uris[run_id] = run.info.artifact_uri
            return run_id

    def log(
        self,
        mlflow_id: str,
        points: Sequence[Point] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Send points, parameters and tags in as few requests as MLflow's limits allow."""
        from mlflow.entities import Metric, Param, RunTag

        left_metrics = [Metric(*point) for point in points]
        left_params = [Param(key, value) for key, value in (params or {}).items()]
        left_tags = [RunTag(key, value) for key, value in (tags or {}).items()]
        while left_metrics or left_params or left_tags:
            some_params, left_params = _split(left_params, _PARAMS_OR_TAGS_PER_BATCH)
            some_tags, left_tags = _split(left_tags, _PARAMS_OR_TAGS_PER_BATCH)
            room = _ENTITIES_PER_BATCH - len(some_params) - len(some_tags)
            some_metrics, left_metrics = _split(left_metrics, room)
            with _translated():
                self._client().log_batch(
                    mlflow_id, metrics=some_metrics, params=some_params, tags=some_tags, synchronous=True
                )

    def params(self, mlflow_id: str) -> dict[str, str]:
        """Return the existing parameters of a run; MLflow refuses other values for them."""
        with _translated():
            return dict(self._client().get_run(mlflow_id).data.params)

    def history(self, mlflow_id: str, key: str) -> set[tuple[int, int]]:
        """Return (step, time stamp in ms) of every point of a metric."""
        with _translated():
            return {
                (point.step, point.timestamp) for point in self._client().get_metric_history(mlflow_id, key)
            }

    def set_state(self, mlflow_id: str, status: str, end_unix: float | None) -> None:
        """Set the status; RUNNING reopens a run."""
        with _translated():
            if status == "RUNNING":
                self._client().update_run(mlflow_id, status=status)
            else:
                self._client().set_terminated(mlflow_id, status=status, end_time=_milliseconds(end_unix))

    def rename(self, mlflow_id: str, name: str) -> None:
        """Change a run's name."""
        with _translated():
            self._client().update_run(mlflow_id, name=name)

    def log_file(self, mlflow_id: str, path: Path) -> None:
        """Store a file as an artifact."""
        with _translated():
            self._repository(mlflow_id).log_artifact(str(path))

    def log_folder(self, mlflow_id: str, path: Path, name: str) -> None:
        """Store a folder's files as artifacts under ``name``."""
        with _translated():
            self._repository(mlflow_id).log_artifacts(str(path), artifact_path=name)

    def delete_run(self, mlflow_id: str) -> None:
        """Move a run to MLflow's bin."""
        with _translated():
            self._client().delete_run(mlflow_id)

    def _repository(self, mlflow_id: str) -> Any:
        """Return a run's artifact store; MLflow's client would query the run each time."""
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        if mlflow_id not in self._artifact_uris:
            self._artifact_uris[mlflow_id] = self._client().get_run(mlflow_id).info.artifact_uri
        return get_artifact_repository(self._artifact_uris[mlflow_id], tracking_uri=self._uri)

    def _client(self) -> Any:
        if self._opened is None:
            for key, value in MLFLOW_ENVIRONMENT.items():
                os.environ.setdefault(key, value)
            from mlflow import MlflowClient

            path = sqlite_path(self._uri)
            if path is not None and not path.exists():
                make_database(path, self._artifacts)
            self._opened = MlflowClient(self._uri)
        return self._opened


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # MLflow, SQLAlchemy, requests and the file system raise their own errors
        words = " ".join(str(error).split())
        line = redact(f"{type(error).__name__}: {words}")[:500]
        if getattr(error, "error_code", None) in _ABOUT_ONE_RUN or isinstance(error, FileNotFoundError):
            raise Refused(line) from None
        if isinstance(error, ModuleNotFoundError):
            line = f"the database's driver is missing: pip install {error.name}"
        raise Away(line) from None


def _milliseconds(unix: float | None) -> int | None:
    return None if unix is None else round(unix * 1000)


def _split(items: list[Any], count: int) -> tuple[list[Any], list[Any]]:
    return items[:count], items[count:]
