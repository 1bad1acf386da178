"""The only module that talks to MLflow: its address, calls, limits, kinds of failure and sqlite file.

How it fails: ``Refused`` concerns one run, ``Away`` the whole store. MLflow's error texts can contain the
address with its password, so they are redacted here first.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ablate.base.command_hints import redact
from ablate.base.errors import UserError
from ablate.base.files import changed_by_others
from ablate.track.describe import SUMMARY

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from ablate.track.describe import Point

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

_LOCAL = frozenset(
    {
        "ext2",
        "ext3",
        "ext4",
        "xfs",
        "btrfs",
        "zfs",
        "f2fs",
        "tmpfs",
        "overlay",
        "bcachefs",
    }
)

STORE_TAG = "ablate.store"
RUN_TAG = "ablate.run_id"
SUMMARY_TAG = "ablate.summary"
_MOST_RUNS = 50_000
"""As many as MLflow gives at once, and more than a study has."""
VIEW = "ablate"
"""The name of the view in which the study's page keeps its columns."""

_ABOUT_ONE_RUN = (
    "RESOURCE_DOES_NOT_EXIST",
    "INVALID_PARAMETER_VALUE",
    "INVALID_STATE",
    "RESOURCE_ALREADY_EXISTS",
)


class Refused(Exception):  # noqa: N818  it reads as what it is
    """MLflow refuses what was sent about one run, which was deleted or has a value that MLflow forbids."""


class Away(Exception):  # noqa: N818  it reads as what it is
    """The tracking store cannot be used now: no answer, a 5xx, a locked database."""


@contextmanager
def _translated() -> Iterator[None]:
    """Turn errors of MLflow, SQLAlchemy, requests and the file system into ``Refused`` or ``Away``."""
    try:
        yield
    except Exception as error:
        words = " ".join(str(error).split())
        line = redact(f"{type(error).__name__}: {words}")[:500]
        if getattr(error, "error_code", None) in _ABOUT_ONE_RUN or isinstance(
            error, FileNotFoundError
        ):
            raise Refused(line) from None
        if isinstance(error, ModuleNotFoundError):
            line = f"the database's driver is missing: pip install {error.name}"
        raise Away(line) from None


def scheme(uri: str) -> str:
    """Read an address's scheme: ``postgresql`` of ``postgresql+psycopg2://…``, an empty text of a path."""
    head, separator, _ = uri.partition(":")
    return head.partition("+")[0].lower() if separator else ""


def is_database(uri: str) -> bool:
    """Whether the address is a database, whose pages need a server started by this package."""
    return scheme(uri) in ("sqlite", "postgresql", "mysql", "mssql")


def sqlite_path(uri: str) -> Path | None:
    """Return the file of a sqlite address, None for any other address."""
    if scheme(uri) == "sqlite" and ":///" in uri:
        return Path(uri.split(":///", 1)[1])
    return None


def default_tracking_uri(storage: Path) -> str:
    """Return the address of ``mlflow.db`` in the studies' storage."""
    return f"sqlite:///{storage.resolve() / 'mlflow.db'}"


def resolve_tracking_uri(storage: Path, option: str | None = None) -> str:
    """Choose the option, else $MLFLOW_TRACKING_URI, else the default; relative sqlite paths become absolute.

    Raises:
        UserError: a plain folder or ``file:``, which MLflow refuses, or a file that others can change.
    """
    uri = (
        option or os.environ.get("MLFLOW_TRACKING_URI") or default_tracking_uri(storage)
    )
    if scheme(uri) in ("", "file") and uri not in ("databricks", "uc"):
        raise UserError(
            f"MLflow keeps no runs in plain files: '{redact(uri)}' "
            "(expected http(s)://host:port or sqlite:///path/to/mlflow.db)"
        )
    path = sqlite_path(uri)
    if path and path.exists() and (fault := changed_by_others(path, group_may=True)):
        raise UserError(
            f"{fault}: it can name any folder for artifacts (take another with --tracking-uri)"
        )
    return f"sqlite:///{path.resolve()}" if path else uri


class Sink:
    """MLflow at one address. Nothing is imported or opened before the first call.

    Every method raises ``Refused`` or ``Away`` if MLflow fails.
    """

    def __init__(self, tracking_uri: str, storage: Path) -> None:
        self._uri = tracking_uri
        self._artifacts = storage.resolve() / "mlartifacts"
        self._opened: Any = None

    @_translated()
    def experiment(self, name: str) -> str:
        """Find or create the study's experiment; return its id.

        A deleted experiment is restored, because its name stays taken. MLflow then restores all of its runs
        too, of which ``known_runs`` keeps one each.
        """
        client = self._client()
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            # A server chooses the place of artifacts; without a server they are kept in the storage.
            if is_database(self._uri):
                place = (self._artifacts / name).as_uri()
            else:
                place = None
            tags = {"mlflow.experimentKind": "custom_model_development"}
            return str(
                client.create_experiment(name, artifact_location=place, tags=tags)
            )
        if experiment.lifecycle_stage != "active":
            client.restore_experiment(experiment.experiment_id)
        return str(experiment.experiment_id)

    @_translated()
    def describe(self, experiment_id: str, note: str, view: str) -> None:
        """Replace the experiment's description and the view named in the dashboard's address."""
        self._client().set_experiment_tag(experiment_id, "mlflow.note.content", note)
        self._client().set_experiment_tag(
            experiment_id, f"mlflow.sharedViewState.{VIEW}", view
        )

    @_translated()
    def known_runs(
        self, experiment_id: str, store_id: str, preferred: Collection[str] = ()
    ) -> dict[str, Any]:
        """Find MLflow's runs of the study by run id (``summary`` for the report), one of each.

        A request whose answer was lost is sent again and may make a second run: all but one are deleted. If
        one of them has an id in ``preferred`` (MLflow's ids), that one is kept.
        """
        copies: dict[str, list[Any]] = {}
        condition = f"tags.`{STORE_TAG}` = '{store_id}'"
        for run in self._client().search_runs(
            [experiment_id], condition, max_results=_MOST_RUNS
        ):
            tags = run.data.tags
            if key := SUMMARY if SUMMARY_TAG in tags else tags.get(RUN_TAG):
                copies.setdefault(key, []).append(run)
        known = {}
        for key, runs in copies.items():
            runs.sort(
                key=lambda run: (run.info.run_id not in preferred, run.info.run_id)
            )
            known[key] = runs[0]
            for other in runs[1:]:
                self._client().delete_run(other.info.run_id)
        return known

    @_translated()
    def create_run(
        self, experiment_id: str, start_unix: float | None, tags: Mapping[str, str]
    ) -> Any:
        """Start an MLflow run and return it; ``tags`` say whose it is (``STORE_TAG`` and another).

        MLflow's client sends the request again if no answer comes. So there may be two runs until
        ``known_runs`` is called.
        """
        return self._client().create_run(
            experiment_id, _milliseconds(start_unix), dict(tags)
        )

    @_translated()
    def log(
        self,
        mlflow_id: str,
        points: Sequence[Point],
        params: Mapping[str, str],
        tags: Mapping[str, str],
    ) -> None:
        """Send points, parameters and tags; MLflow's client splits them into as few requests as it can."""
        from mlflow.entities import Metric, Param, RunTag

        self._client().log_batch(
            mlflow_id,
            [Metric(*point) for point in points],
            [Param(*pair) for pair in params.items()],
            [RunTag(*pair) for pair in tags.items()],
            synchronous=True,
        )

    @_translated()
    def history(self, mlflow_id: str, key: str) -> set[tuple[int, int]]:
        """Read (step, time stamp in ms) of every point of a metric."""
        return {
            (point.step, point.timestamp)
            for point in self._client().get_metric_history(mlflow_id, key)
        }

    @_translated()
    def set_state(self, mlflow_id: str, status: str, end_unix: float | None) -> None:
        """Set MLflow's status; RUNNING reopens a run and ignores ``end_unix``."""
        if status == "RUNNING":
            self._client().update_run(mlflow_id, status=status)
        else:
            self._client().set_terminated(
                mlflow_id, status=status, end_time=_milliseconds(end_unix)
            )

    @_translated()
    def log_artifact(self, run: Any, path: Path) -> None:
        """Store a file, or a folder under its name.

        MLflow's client is not used, because it would query the run each time.
        """
        from mlflow.store.artifact.artifact_repository_registry import (
            get_artifact_repository,
        )

        repository = get_artifact_repository(
            run.info.artifact_uri, tracking_uri=self._uri
        )
        if path.is_dir():
            repository.log_artifacts(str(path), artifact_path=path.name)
        else:
            repository.log_artifact(str(path))

    @_translated()
    def delete_run(self, mlflow_id: str) -> None:
        """Move a run to MLflow's bin."""
        self._client().delete_run(mlflow_id)

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


def make_database(path: Path, artifacts: Path) -> None:
    """Create MLflow's database at ``path``; ``artifacts`` is the default folder of its experiments.

    MLflow's migrations take seconds and do not survive a kill, so they run on a temporary file that is
    renamed at the end. A database that another process created first is kept. On a local disk the file uses
    write-ahead mode: a commit waits for one disk write instead of three or four, and readers of the pages do
    not lock the mirror out. The mode needs shared memory, which network file systems lack.
    """
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".mlflow-") as folder:
        fresh = Path(folder) / "mlflow.db"
        fresh.touch()  # a group that shares the storage can write it; sqlite itself would not allow that
        store = SqlAlchemyStore(f"sqlite:///{fresh}", artifacts.as_uri())
        store.engine.dispose()
        if is_local(path.parent):
            with closing(sqlite3.connect(fresh)) as connection:
                connection.execute("PRAGMA journal_mode=WAL")
        try:
            path.hardlink_to(fresh)
        except FileExistsError:
            return
        except OSError:  # the file system has no hard links
            fresh.replace(path)


def is_local(folder: Path) -> bool:
    """Whether a folder is known to be on a local disk."""
    try:
        disks = psutil.disk_partitions(all=True)
    except OSError:  # there is no list of mounts to read
        return False
    holding = [
        disk for disk in disks if folder.resolve().is_relative_to(disk.mountpoint)
    ]
    nearest = max(holding, key=lambda disk: len(disk.mountpoint), default=None)
    return nearest is not None and nearest.fstype in _LOCAL


def _milliseconds(unix: float | None) -> int | None:
    return None if unix is None else round(unix * 1000)
