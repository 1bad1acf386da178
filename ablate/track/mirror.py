"""The mirror: one writer sends what is new in a study's run store to MLflow, in passes (docs/mlflow.md).

A pass takes one run after the other: first the status (after a final status no rows follow), then the rows
after the cursor, then tags, artifacts and the end.

How it fails: it never raises. A fault is a line in the report, and whatever was not accepted stays unsent for
the next pass. Two mirrors of one study take turns through a lock on the cursor.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from ablate.base.command_hints import redact
from ablate.base.files import write_json_atomic
from ablate.track import describe
from ablate.track.cursor import (
    FILES,
    REWOUND,
    Cursor,
    MirrorReport,
    RunCursor,
    cursor_lock,
    cursor_path,
    digest,
    folder_digest,
    is_rewound,
    load_cursor,
    pending,
    state_key,
    store_id,
)
from ablate.track.results import SUMMARY, Results, read_results, result_points
from ablate.track.sink import STORE_TAG, SUMMARY_TAG, Away, Refused, Sink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from ablate.store import RunDir, State, StudyStore
    from ablate.store.plan_file import LockedPlan, LockedRun
    from ablate.track.sink import Known

_CHUNK_BYTES = 1 << 18
_SAVE_EVERY_SEC = 1.0
_MLFLOW_STATUS: dict[State, str] = {
    "pending": "RUNNING",
    "running": "RUNNING",
    "finished": "FINISHED",
    "diverged": "FINISHED",  # it has a result; the tag ablate.state tells it apart
    "failed": "FAILED",
    "interrupted": "KILLED",
    "stopped": "KILLED",
}
_ARTIFACTS = ("config.json", "environment.json")

_log = logging.getLogger(__name__)
_Stamp = tuple[tuple[int, int, int] | None, ...]


class Mirror:
    """Sends one study's runs to one tracking store; keep it for several passes, because it caches files."""

    def __init__(self, store: StudyStore, tracking_uri: str) -> None:
        self._store = store
        self._uri = tracking_uri
        self._forget()

    def sync_once(self, should_stop: Callable[[], bool] = lambda: False) -> MirrorReport:
        """Send everything that is new since the last pass; never raises for faults of MLflow.

        ``should_stop`` is asked after each run; the next pass goes on from there.
        """
        self._should_stop = should_stop
        self._runs_sent = self._metrics_sent = 0
        self._problems: list[str] = []
        try:
            with cursor_lock(self._store, self._uri):
                if not cursor_path(self._store, self._uri).exists():
                    self._forget()
                cursor = load_cursor(self._store, self._uri)
                try:
                    self._sync(cursor)
                except Exception as error:  # no fault of the mirror may end a study
                    self._problems.append(_one_line(error))
                cursor.problem = self._problem()
                self._save(cursor)
        except Exception as error:  # the study's folder cannot be written
            self._problems.append(_one_line(error))
        report = MirrorReport(
            runs_sent=self._runs_sent,
            metrics_sent=self._metrics_sent,
            unsent=pending(self._store, self._uri).unsent if self._problems else (),
            problem=self._problem(),
            experiment_id=self._experiment_id,
        )
        if self._problems:
            self._forget()
        return report

    def _problem(self) -> str | None:
        return "; ".join(self._problems[:3]) or None

    def _forget(self) -> None:
        """Clear the caches: MLflow's content may have changed while it was away."""
        self._sink = Sink(self._uri, self._store.path.parent)
        self._experiment_id: str | None = None
        self._report = ""
        self._known: dict[str, str] = {}
        self._stamps: dict[str, _Stamp] = {}
        self._report_stamp: _Stamp | None = None
        self._results: tuple[_Stamp, Results] = ((), {})
        self._saved_sec = 0.0
        self._saved = ""

    def _sync(self, cursor: Cursor) -> None:
        plan_stamp = _stamp([self._store.plan_path])  # before reading, so that a change in between is noticed
        plan = self._store.plan()
        if self._experiment_id is None:
            self._open(cursor, plan.study)
        self._read_results(cursor, plan.study)
        assert self._experiment_id is not None
        note, view = describe.study_note(plan, report=self._report), describe.view(plan)
        if cursor.note != digest(note + view):
            self._sink.describe(self._experiment_id, note, view)
            cursor.note = digest(note + view)
        for place, arm in enumerate(plan.arms):
            for planned in arm.runs:
                if self._should_stop():
                    self._problems.append("stopped")
                    return
                run = self._store.run(planned.id)
                files = _stamp(run.path / name for name in (*FILES, "status.json", "environment.json"))
                stamp = files + plan_stamp
                if not any(files) or self._stamps.get(run.run_id) == stamp:
                    continue
                try:
                    self._sync_run(cursor, plan, place, planned)
                    self._stamps[run.run_id] = stamp
                    self._runs_sent += 1
                except Away:
                    raise
                except Exception as error:  # a faulty run must not delay the others
                    # Usually the run was deleted in MLflow: the next pass creates it again.
                    cursor.runs.pop(run.run_id, None)
                    self._problems.append(f"run {run.run_id}: {_one_line(error)}")
                if time.monotonic() - self._saved_sec > _SAVE_EVERY_SEC:
                    self._save(cursor)
        self._sync_results(cursor)
        self._sync_report(cursor)

    def _open(self, cursor: Cursor, study: str) -> None:
        """Find the experiment and its runs; drop from the cursor the runs that MLflow no longer has."""
        owner = store_id(self._store)
        experiment_id = self._sink.experiment(study, owner)
        preferred = {entry.mlflow_id for entry in cursor.runs.values()} | {cursor.report_run or ""}
        there = self._sink.known_runs(experiment_id, owner, preferred)
        self._known = {key: known.mlflow_id for key, known in there.items()}
        cursor.runs = {
            key: entry
            for key, entry in cursor.runs.items()
            if key in there and _has_what_was_sent(there[key], entry)
        }
        if cursor.report_run not in self._known.values():
            cursor.report_run, cursor.report = None, ""
        elif cursor.results.keys() - there[SUMMARY].steps.keys():
            cursor.report, cursor.results, cursor.note = "", {}, ""
        if cursor.experiment_id != experiment_id:
            cursor.note = ""
        cursor.experiment_id = experiment_id
        # Created first, so that every run can link to it.
        cursor.report_run = cursor.report_run or self._known.get(SUMMARY)
        if cursor.report_run is None:
            cursor.report, cursor.results = "", {}
            cursor.report_run = self._new_report_run(experiment_id, study)
        self._report = describe.report_link(experiment_id, cursor.report_run)
        self._experiment_id = experiment_id

    def _sync_run(self, cursor: Cursor, plan: LockedPlan, place: int, planned: LockedRun) -> None:
        arm = plan.arms[place]
        run = self._store.run(planned.id)
        status = run.examined()
        if status.state == "damaged":
            self._problems.append(f"run {run.run_id} is not sent: {status.message}")
            return
        environment = run.environment()
        name = describe.run_name(arm.name, planned.seed)
        tags = describe.run_tags(plan, place, planned, status, environment, report=self._report)
        tags_key = digest(sorted(tags.items()))

        entry = cursor.runs.get(run.run_id)
        if entry and is_rewound(run, entry):
            # MLflow keeps every point, and would show both curves in one.
            _log.info("run %s was rewound: it gets a new MLflow run", run.run_id)
            del cursor.runs[run.run_id]
            self._sink.delete_run(entry.mlflow_id)
            self._known.pop(run.run_id, None)
            entry = None
        params: dict[str, str] = {}
        if entry is None:
            params = describe.run_params(run.config(), arm)
            entry = self._adopt(run)
            if entry:
                there = self._sink.params(entry.mlflow_id)
                params = {key: value for key, value in params.items() if key not in there}
            else:
                assert self._experiment_id is not None
                owned = tags | {STORE_TAG: store_id(self._store)}
                mlflow_id = self._sink.create_run(self._experiment_id, name, status.started_unix, owned)
                self._known[run.run_id] = mlflow_id
                entry = RunCursor(mlflow_id=mlflow_id, name=name, tags=tags_key, mlflow_status="RUNNING")
            cursor.runs[run.run_id] = entry

        new_tags = tags if entry.tags != tags_key else {}
        while True:
            found: list[describe.Point] = []
            offsets = {}
            for file in FILES:
                more, offsets[file] = describe.read_points(run.path / file, entry.offsets[file], _CHUNK_BYTES)
                found += more
            if found or params or new_tags:
                self._sink.log(entry.mlflow_id, found, params, new_tags)
                self._metrics_sent += len(found)
                for point in found:
                    entry.steps[point.key] = max(point.step, entry.steps.get(point.key, 0))
                params, new_tags = {}, {}
            if offsets == entry.offsets:
                break
            entry.offsets = offsets
            entry.tails = {
                file: describe.tail_digest(run.path / file, offsets[file]) or "" for file in REWOUND
            }
        entry.tags = tags_key
        self._send_artifacts(run, entry)
        if entry.name != name:
            self._sink.rename(entry.mlflow_id, name)
            entry.name = name
        mlflow_status = _MLFLOW_STATUS[status.state]
        if entry.state != state_key(status):
            if mlflow_status != "RUNNING" or entry.mlflow_status != "RUNNING":
                self._sink.set_state(entry.mlflow_id, mlflow_status, status.ended_unix or status.updated_unix)
            entry.state, entry.mlflow_status = state_key(status), mlflow_status

    def _adopt(self, run: RunDir) -> RunCursor | None:
        """Return the cursor of the run's existing MLflow run, unless it has points that the file lacks."""
        mlflow_id = self._known.get(run.run_id)
        if mlflow_id is None:
            return None
        ours = {(point.step, point.timestamp_ms) for row in run.metrics() for point in describe.points(row)}
        if all(self._sink.history(mlflow_id, key) <= ours for key in ("train_loss", "val_loss")):
            return RunCursor(mlflow_id=mlflow_id)
        self._sink.delete_run(mlflow_id)
        return None

    def _send_artifacts(self, run: RunDir, entry: RunCursor) -> None:
        for file in _ARTIFACTS:
            path = run.path / file
            if not path.exists():
                continue
            content = digest(path.read_bytes())
            if entry.artifacts.get(file) != content:
                self._sink.log_file(entry.mlflow_id, path)
                entry.artifacts[file] = content

    def _read_results(self, cursor: Cursor, study: str) -> None:
        """Read what the report says. MLflow deletes no figure: a run that lost one is replaced."""
        report = self._store.path / "report" / "report.json"
        if (stamp := _stamp([report])) != self._results[0]:
            self._results = stamp, read_results(report)
        found = self._results[1]
        for run_id, entry in list(cursor.runs.items()):
            if entry.results.keys() - found.get(run_id, entry.results).keys():
                self._sink.delete_run(entry.mlflow_id)
                self._known.pop(run_id, None)
                self._stamps.pop(run_id, None)
                del cursor.runs[run_id]
        if cursor.report_run and cursor.results.keys() - found.get(SUMMARY, cursor.results).keys():
            self._sink.delete_run(cursor.report_run)
            cursor.report_run = None
            self._open(cursor, study)

    def _sync_results(self, cursor: Cursor) -> None:
        """Send what the report says of each run and of the arms where it is news."""
        runs = {run_id: (entry.mlflow_id, entry.results) for run_id, entry in cursor.runs.items()}
        if cursor.report_run is not None:
            runs[SUMMARY] = cursor.report_run, cursor.results
        for run_id, (mlflow_id, sent) in runs.items():
            figures = self._results[1].get(run_id, {})
            news = {name: value for name, value in figures.items() if sent.get(name) != value}
            if news:
                unix = (self._store.path / "report" / "report.json").stat().st_mtime
                self._sink.log(mlflow_id, result_points(news, unix))
                self._metrics_sent += len(news)
                sent.update(news)

    def _sync_report(self, cursor: Cursor) -> None:
        folder = self._store.path / "report"
        if cursor.report_run is None or not (folder / "report.html").exists():
            return
        stamp = _stamp(path for path in sorted(folder.rglob("*")) if path.is_file())
        if stamp == self._report_stamp:
            return
        content = folder_digest(folder)
        try:
            if cursor.report != content:
                self._sink.log_folder(cursor.report_run, folder, "report")
                self._sink.set_state(cursor.report_run, "FINISHED", None)
                cursor.report = content
            self._report_stamp = stamp
        except Refused as error:
            cursor.report_run, cursor.report = None, ""
            self._problems.append(f"report: {error}")

    def _new_report_run(self, experiment_id: str, study: str) -> str:
        tags = {STORE_TAG: store_id(self._store), SUMMARY_TAG: "true", "mlflow.source.name": "ablate"}
        mlflow_id = self._sink.create_run(experiment_id, f"report: {study}", None, tags)
        note = describe.summary_note(study, describe.report_link(experiment_id, mlflow_id))
        self._sink.log(mlflow_id, tags={"mlflow.note.content": note})
        self._known[SUMMARY] = mlflow_id
        return mlflow_id

    def _save(self, cursor: Cursor) -> None:
        content = repr(cursor)
        if content != self._saved:
            write_json_atomic(cursor_path(self._store, self._uri), asdict(cursor))
            self._saved = content
        self._saved_sec = time.monotonic()


def _has_what_was_sent(there: Known, entry: RunCursor) -> bool:
    """Whether MLflow still has what it accepted of a run: its database may be an older copy of itself."""
    return (
        there.mlflow_id == entry.mlflow_id
        and there.status == entry.mlflow_status
        and all(there.steps.get(key, -1) >= step for key, step in entry.steps.items())
        and entry.results.keys() <= there.steps.keys()
    )


def _one_line(error: Exception) -> str:
    if isinstance(error, Away | Refused):
        return str(error)
    return redact(f"{type(error).__name__}: {error}".replace("\n", " "))


def _stamp(paths: Iterable[Path]) -> _Stamp:
    """Return a value that changes whenever one of the files does."""
    found: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            status = path.stat()
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        except FileNotFoundError:
            found.append(None)
    return tuple(found)
