"""The mirror: one writer sends what is new in a study's run store to MLflow, in passes (docs/mlflow.md).

A pass takes one run after the other: first the status (after a final status no rows follow), then the rows
after the cursor with tags and parameters, artifacts and the end; at last the run that holds the report.

How it fails: it never raises. A fault is a line in the report, and whatever was not accepted stays unsent for
the next pass. Two mirrors of one study take turns through a lock on the cursor.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
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
from ablate.track.describe import SUMMARY, Point
from ablate.track.sink import STORE_TAG, SUMMARY_TAG, Away, Known, Refused, Sink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from ablate.store import RunDir, State, StudyStore
    from ablate.store.plan_file import LockedPlan, LockedRun

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

_Stamp = tuple[tuple[int, int, int] | None, ...]


class Mirror:
    """Sends one study's runs to one tracking store; keep it for several passes, because it caches files."""

    def __init__(self, store: StudyStore, tracking_uri: str) -> None:
        self._store, self._uri = store, tracking_uri
        self._session: _Session | None = None

    def sync_once(self) -> MirrorReport:
        """Send everything that is new since the last pass; never raises for faults of MLflow.

        It may be interrupted: the next pass goes on from there.
        """
        one = _Pass(store=self._store, uri=self._uri, session=self._session)
        try:
            with cursor_lock(self._store, self._uri):
                one.run()
        except Exception as error:  # the study's folder cannot be written
            one.problems.append(_one_line(error))
        # After a problem all is looked at anew: MLflow's content may have changed while it was away.
        self._session = None if one.problems else one.session
        return MirrorReport(
            runs_sent=one.runs_sent,
            metrics_sent=one.metrics_sent,
            unsent=pending(self._store, self._uri).unsent if one.problems else (),
            problem=one.problem(),
            experiment_id=one.cursor.experiment_id if one.session else None,
        )


@dataclass(kw_only=True)
class _Session:
    """What is known of MLflow as long as it answers. ``stamps``: of each run's files when they were sent."""

    sink: Sink
    experiment_id: str
    known: dict[str, Known]
    stamps: dict[str, object] = field(default_factory=dict)


@dataclass(kw_only=True)
class _Pass:
    store: StudyStore
    uri: str
    session: _Session | None
    cursor: Cursor = field(default_factory=Cursor)
    problems: list[str] = field(default_factory=list)
    runs_sent: int = 0
    metrics_sent: int = 0
    has_new_runs: bool = False
    saved: str = ""
    saved_sec: float = 0.0

    def problem(self) -> str | None:
        return "; ".join(self.problems[:3]) or None

    def run(self) -> None:
        self.cursor = load_cursor(self.store, self.uri)
        self.saved = repr(self.cursor)
        try:
            self._sync()
        except Exception as error:  # no fault of the mirror may end a study
            self.problems.append(_one_line(error))
        finally:
            self.cursor.problem = self.problem()
            self._save()

    def _sync(self) -> None:
        plan_stamp = _stamp([self.store.plan_path])  # before reading, so that a change in between is noticed
        plan = self.store.plan()
        if self.session is None or self.cursor.experiment_id is None:
            self.session = self._open(plan.study)
        session, cursor = self.session, self.cursor
        # First, so that every run can link to it.
        owned = {
            SUMMARY_TAG: "true",
            "mlflow.source.name": "ablate",
            "mlflow.runName": f"report: {plan.study}",
        }
        summary = self._entry(SUMMARY, owned)
        link = describe.report_link(session.experiment_id, summary.mlflow_id)
        note, view = describe.study_note(plan, report=link), describe.view(plan)
        if cursor.note != digest(note + view):
            session.sink.describe(session.experiment_id, note, view)
            cursor.note = digest(note + view)
        work: list[tuple[str, tuple[object, ...], Callable[[], None]]] = []
        for place, arm in enumerate(plan.arms):
            for planned in arm.runs:
                run = self.store.run(planned.id)
                files = _stamp(run.path / name for name in (*FILES, "status.json", "environment.json"))
                if any(files):
                    stamps = files, plan_stamp, self._results_stamp, link
                    work.append((planned.id, stamps, partial(self._sync_run, plan, place, planned, link)))
        owned["mlflow.note.content"] = describe.summary_note(plan.study, link)
        folder = self.store.path / "report"
        report_files = _stamp(path for path in sorted(folder.rglob("*")) if path.is_file())
        work.append((SUMMARY, (report_files, link), partial(self._sync_summary, summary, owned)))
        for key, stamp, sync in work:
            if session.stamps.get(key) == stamp:
                continue
            try:
                sync()
                session.stamps[key] = stamp
                self.runs_sent += key != SUMMARY
            except Away:
                raise
            except Exception as error:  # a faulty run must not delay the others
                # Usually the run was deleted in MLflow: the next pass creates it again.
                cursor.runs.pop(key, None)
                self.problems.append(f"run {key}: {_one_line(error)}")
            if time.monotonic() - self.saved_sec > _SAVE_EVERY_SEC:
                self._save()
        if self.has_new_runs:  # a server that loses the answer is asked again, and has two
            session.sink.known_runs(session.experiment_id, store_id(self.store), self._mlflow_ids())

    def _mlflow_ids(self) -> set[str]:
        return {entry.mlflow_id for entry in self.cursor.runs.values()}

    def _open(self, study: str) -> _Session:
        """Find the experiment and its runs; drop from the cursor the runs that MLflow no longer has so."""
        sink, cursor, owner = Sink(self.uri, self.store.path.parent), self.cursor, store_id(self.store)
        experiment_id = sink.experiment(study, owner)
        there = sink.known_runs(experiment_id, owner, self._mlflow_ids())
        if cursor.experiment_id != experiment_id:
            cursor.note = ""
        cursor.runs = {
            key: entry
            for key, entry in cursor.runs.items()
            if key in there and there[key].mlflow_id == entry.mlflow_id
        }
        cursor.experiment_id = experiment_id
        return _Session(sink=sink, experiment_id=experiment_id, known=there)

    @cached_property
    def _results_stamp(self) -> _Stamp:
        return _stamp([self.store.path / "report" / "report.json"])

    @cached_property
    def _results(self) -> describe.Results:
        return describe.read_results(self.store.path / "report" / "report.json", self._results_stamp)

    def _entry(
        self,
        key: str,
        tags: Mapping[str, str],
        *,
        started_unix: float | None = None,
        run: RunDir | None = None,
    ) -> RunCursor:
        """Return the cursor of a run's MLflow run: the one it has, one that is there already, or a new one.

        MLflow deletes no point: a run that was rewound, or lost a figure of the report, gets a new one.
        """
        assert self.session is not None
        sink, known, entry = self.session.sink, self.session.known, self.cursor.runs.get(key)
        if entry and (
            entry.results.keys() - self._results.get(key, entry.results).keys()
            or (run and is_rewound(run, entry))
        ):
            sink.delete_run(entry.mlflow_id)
            known.pop(key, None)
            entry = None
        if entry is None and (there := known.get(key)):
            entry = RunCursor(mlflow_id=there.mlflow_id, mlflow_status="")
            if run and not _holds_only(sink, entry.mlflow_id, run):
                sink.delete_run(entry.mlflow_id)
                del known[key]
                entry = None
        if entry is None:
            owned = {STORE_TAG: store_id(self.store), **tags}
            mlflow_id = sink.create_run(self.session.experiment_id, started_unix, owned)
            known[key], self.has_new_runs = Known(mlflow_id=mlflow_id), True
            entry = RunCursor(mlflow_id=mlflow_id, tags=digest(sorted(tags.items())))
        self.cursor.runs[key] = entry
        return entry

    def _sync_run(self, plan: LockedPlan, place: int, planned: LockedRun, link: str) -> None:
        arm, run = plan.arms[place], self.store.run(planned.id)
        status = run.examined()
        if status.state == "damaged":
            self.problems.append(f"run {run.run_id} is not sent: {status.message}")
            return
        tags = describe.run_tags(plan, place, planned, status, run.environment(), report=link)
        entry = self._entry(run.run_id, tags, started_unix=status.started_unix, run=run)
        assert self.session is not None
        params: dict[str, str] = {}
        if not entry.has_params:
            there = self.session.known[run.run_id].params
            params = describe.run_params(run.config(), arm)
            params = {key: value for key, value in params.items() if key not in there}
        self._send(run.run_id, entry, tags, params, run.path)
        entry.has_params = True
        for file in _ARTIFACTS:
            path = run.path / file
            if path.exists() and entry.artifacts.get(file) != (content := digest(path.read_bytes())):
                self.session.sink.log_file(entry.mlflow_id, path)
                entry.artifacts[file] = content
        if entry.state != state_key(status):
            mlflow_status = _MLFLOW_STATUS[status.state]
            if mlflow_status != "RUNNING" or entry.mlflow_status != "RUNNING":
                self._set_status(entry, mlflow_status, status.ended_unix or status.updated_unix)
            entry.state = state_key(status)

    def _sync_summary(self, entry: RunCursor, tags: dict[str, str]) -> None:
        assert self.session is not None
        self._send(SUMMARY, entry, tags)
        folder = self.store.path / "report"
        if (folder / "report.html").exists() and entry.artifacts.get("report") != (
            content := folder_digest(folder)
        ):
            self.session.sink.log_folder(entry.mlflow_id, folder, "report")
            entry.artifacts["report"] = content
            self._set_status(entry, "FINISHED", None)

    def _set_status(self, entry: RunCursor, mlflow_status: str, ended_unix: float | None) -> None:
        assert self.session is not None
        self.session.sink.set_state(entry.mlflow_id, mlflow_status, ended_unix)
        entry.mlflow_status = mlflow_status

    def _send(
        self,
        key: str,
        entry: RunCursor,
        tags: Mapping[str, str],
        params: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        """Send what is new of a run's rows, of what the report says of it, and of its tags and parameters."""
        assert self.session is not None
        figures = self._results.get(key, {})
        news = {name: value for name, value in figures.items() if entry.results.get(name) != value}
        (written,) = self._results_stamp
        # Without an axis; of two with the same name MLflow shows the later.
        found = [Point(name, value, round(written[2] / 1e6), 0) for name, value in news.items() if written]
        tags_digest = digest(sorted(tags.items()))
        new_tags = tags if entry.tags != tags_digest else {}
        while True:
            offsets = {}
            for file in FILES if folder is not None else ():
                assert folder is not None
                more, offsets[file] = describe.read_points(folder / file, entry.offsets[file], _CHUNK_BYTES)
                found += more
            if found or params or new_tags:
                self.session.sink.log(entry.mlflow_id, found, params, new_tags)
                self.metrics_sent += len(found)
            entry.tags, entry.results = tags_digest, entry.results | news
            if folder is None or offsets == entry.offsets:
                return
            entry.offsets = offsets
            entry.tails = {file: describe.tail_digest(folder / file, offsets[file]) or "" for file in REWOUND}
            found, params, new_tags = [], None, {}

    def _save(self) -> None:
        """Write the cursor where it changed: its time says that the mirror goes on."""
        if (content := repr(self.cursor)) != self.saved:
            write_json_atomic(cursor_path(self.store, self.uri), asdict(self.cursor))
            self.saved = content
        self.saved_sec = time.monotonic()


def _holds_only(sink: Sink, mlflow_id: str, run: RunDir) -> bool:
    """Whether an MLflow run has no points that the run's file lacks."""
    ours = {(point.step, point.timestamp_ms) for row in run.metrics() for point in describe.points(row)}
    return all(sink.history(mlflow_id, key) <= ours for key in ("train_loss", "val_loss"))


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
