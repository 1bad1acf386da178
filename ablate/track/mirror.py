"""The mirror: one writer sends what is new in a study's run store to MLflow, in passes (docs/mlflow.md).

A pass takes one run after the other. It reads the status first, because no rows follow a final status. Then
it sends the rows after the cursor with tags and parameters, the artifacts, and the end. The run that holds
the report comes last.

How it fails: it never raises. A fault is a line in the report, and whatever was not accepted stays unsent for
the next pass. Two mirrors of one study take turns through a lock on the cursor.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

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
from ablate.track.sink import STORE_TAG, SUMMARY_TAG, Away, Refused, Sink

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
    """Sends one study's runs to one tracking store; keep it for several passes, to skip unchanged files.

    ``_known``: MLflow's runs, as long as it answers. ``_stamps``: of each run's files when they were sent.
    """

    def __init__(self, store: StudyStore, tracking_uri: str) -> None:
        self._store, self._uri = store, tracking_uri
        self._folder = store.path / "report"
        self._cursor = Cursor()
        self._saved, self._saved_sec = "", 0.0
        self._results: describe.Results = {}
        self._results_stamp: _Stamp = (None,)
        self._forget()

    def _forget(self) -> None:
        self._sink: Sink | None = None
        self._known: dict[str, Any] = {}
        self._stamps: dict[str, object] = {}

    def sync_once(self) -> MirrorReport:
        """Send everything that is new since the last pass; never raises for faults of MLflow.

        It may be interrupted; the next pass sends the rest.
        """
        self._problems: list[str] = []
        self._runs_sent = self._metrics_sent = 0
        self._has_new_runs = False
        try:
            with cursor_lock(self._store, self._uri):
                self._cursor = load_cursor(self._store, self._uri)
                self._saved = repr(self._cursor)
                try:
                    self._sync()
                except Exception as error:  # no fault of the mirror may end a study
                    self._problems.append(_one_line(error))
                finally:
                    self._cursor.problem = "; ".join(self._problems[:3]) or None
                    self._save()
        except Exception as error:  # the study's folder cannot be written
            self._problems.append(_one_line(error))
        report = MirrorReport(
            runs_sent=self._runs_sent,
            metrics_sent=self._metrics_sent,
            unsent=pending(self._store, self._uri).unsent if self._problems else (),
            problem="; ".join(self._problems[:3]) or None,
            experiment_id=self._cursor.experiment_id if self._sink else None,
        )
        if self._problems:  # check everything again: MLflow's content may have changed while it was away
            self._forget()
        return report

    def _sync(self) -> None:
        plan_stamp = _stamp([self._store.plan_path])  # before reading: a change in between is noticed
        plan = self._store.plan()
        cursor = self._cursor
        sink, known = self._sink, {run.info.run_id for run in self._known.values()}
        # Another mirror of this study may have made runs meanwhile.
        if sink is None or cursor.experiment_id is None or not self._mlflow_ids() <= known:
            sink = self._open(plan.study)
        results_stamp = _stamp([self._folder / "report.json"])
        if results_stamp != self._results_stamp:
            self._results = describe.read_results(self._folder / "report.json")
            self._results_stamp = results_stamp
        # First, so that every run can link to it.
        owned = {
            SUMMARY_TAG: "true",
            "mlflow.source.name": "ablate",
            "mlflow.runName": f"report: {plan.study}",
        }
        summary = self._entry(sink, SUMMARY, owned)
        link = describe.report_link(str(cursor.experiment_id), summary.mlflow_id)
        note, view = describe.study_note(plan, report=link), describe.view(plan)
        if cursor.note != digest(note + view):
            sink.describe(str(cursor.experiment_id), note, view)
            cursor.note = digest(note + view)
        for place, arm in enumerate(plan.arms):
            for planned in arm.runs:
                run = self._store.run(planned.id)
                files = _stamp(run.path / name for name in (*FILES, "status.json", "environment.json"))
                if any(files):
                    stamp = files, plan_stamp, results_stamp, link
                    self._once(planned.id, stamp, partial(self._sync_run, sink, plan, place, planned, link))
        owned["mlflow.note.content"] = (
            f"[The study's report]({link}). It comes when the study ends; "
            f"`ablate report {plan.study}` makes it now."
        )
        files = _stamp(path for path in sorted(self._folder.rglob("*")) if path.is_file())
        self._once(SUMMARY, (files, link), partial(self._sync_summary, sink, summary, owned))
        if self._has_new_runs:  # a repeated request may have made two: all but one are deleted
            sink.known_runs(str(cursor.experiment_id), store_id(self._store), self._mlflow_ids())

    def _once(self, key: str, stamp: object, sync: Callable[[], None]) -> None:
        """Call ``sync`` if the run's files have changed since they were sent."""
        if self._stamps.get(key) == stamp:
            return
        try:
            sync()
            self._stamps[key] = stamp
            self._runs_sent += key != SUMMARY
        except Away:
            raise
        except Exception as error:  # a faulty run must not delay the others
            # Usually the run was deleted in MLflow: the next pass creates it again.
            self._cursor.runs.pop(key, None)
            self._problems.append(f"run {key}: {_one_line(error)}")
        if time.monotonic() - self._saved_sec > _SAVE_EVERY_SEC:
            self._save()

    def _mlflow_ids(self) -> set[str]:
        return {entry.mlflow_id for entry in self._cursor.runs.values()}

    def _open(self, study: str) -> Sink:
        """Find the experiment and its runs; drop runs that MLflow no longer has from the cursor."""
        sink, cursor, owner = Sink(self._uri, self._store.path.parent), self._cursor, store_id(self._store)
        experiment_id = sink.experiment(study, owner)
        self._forget()
        self._known = sink.known_runs(experiment_id, owner, self._mlflow_ids())
        if cursor.experiment_id != experiment_id:
            cursor.note = ""
        there = {key: run.info.run_id for key, run in self._known.items()}
        cursor.runs = {key: one for key, one in cursor.runs.items() if there.get(key) == one.mlflow_id}
        cursor.experiment_id = experiment_id
        self._sink = sink
        return sink

    def _entry(
        self,
        sink: Sink,
        key: str,
        tags: Mapping[str, str],
        *,
        started_unix: float | None = None,
        run: RunDir | None = None,
    ) -> RunCursor:
        """Find or create a run's MLflow run; return its cursor.

        MLflow deletes no points, so a run that was rewound or has lost a figure of the report gets a new one.
        """
        entry, there = self._cursor.runs.get(key), self._known.get(key)
        if entry is not None:
            lost = entry.results.keys() - self._results.get(key, entry.results).keys()
            is_usable = not lost and (run is None or not is_rewound(run, entry))
        elif there is not None:
            entry = RunCursor(mlflow_id=there.info.run_id, mlflow_status="")
            is_usable = True
            if run is not None:  # the cursor was lost: all points must be in the run's file
                own = {(at.step, at.timestamp_ms) for row in run.metrics() for at in describe.points(row)}
                theirs = (sink.history(entry.mlflow_id, key) for key in ("train_loss", "val_loss"))
                is_usable = all(points <= own for points in theirs)
        if entry is not None and not is_usable:
            sink.delete_run(entry.mlflow_id)
            entry = None
        if entry is None:
            owned = {STORE_TAG: store_id(self._store), **tags}
            made = sink.create_run(str(self._cursor.experiment_id), started_unix, owned)
            self._known[key], self._has_new_runs = made, True
            entry = RunCursor(mlflow_id=made.info.run_id, tags=digest(sorted(tags.items())))
        self._cursor.runs[key] = entry
        return entry

    def _sync_run(self, sink: Sink, plan: LockedPlan, place: int, planned: LockedRun, link: str) -> None:
        run = self._store.run(planned.id)
        status = run.examined()
        if status.state == "damaged":
            self._problems.append(f"run {run.run_id} is not sent: {status.message}")
            return
        tags = describe.run_tags(plan, place, planned, status, run.environment(), report=link)
        entry = self._entry(sink, run.run_id, tags, started_unix=status.started_unix, run=run)
        there, params = self._known[run.run_id], {}
        if not entry.has_params:
            params = describe.run_params(run.config(), plan.arms[place])
            params = {key: value for key, value in params.items() if key not in there.data.params}
        self._send(sink, run.run_id, entry, tags, params, run.path)
        entry.has_params = True
        for file in _ARTIFACTS:
            path = run.path / file
            if path.exists() and entry.artifacts.get(file) != (content := digest(path.read_bytes())):
                sink.log_artifact(there, path)
                entry.artifacts[file] = content
        if entry.state != state_key(status):
            mlflow_status = _MLFLOW_STATUS[status.state]
            if mlflow_status != "RUNNING" or entry.mlflow_status != "RUNNING":
                sink.set_state(entry.mlflow_id, mlflow_status, status.ended_unix or status.updated_unix)
            entry.mlflow_status, entry.state = mlflow_status, state_key(status)

    def _sync_summary(self, sink: Sink, entry: RunCursor, tags: dict[str, str]) -> None:
        self._send(sink, SUMMARY, entry, tags)
        if (self._folder / "report.html").exists() and entry.artifacts.get("report") != (
            content := folder_digest(self._folder)
        ):
            sink.log_artifact(self._known[SUMMARY], self._folder)
            sink.set_state(entry.mlflow_id, "FINISHED", None)
            entry.artifacts["report"] = content

    def _send(
        self,
        sink: Sink,
        key: str,
        entry: RunCursor,
        tags: Mapping[str, str],
        params: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        """Send a run's new rows, figures of the report, tags and parameters."""
        figures = self._results.get(key, {})
        news = {name: value for name, value in figures.items() if entry.results.get(name) != value}
        (written,) = self._results_stamp
        # Figures have no axis: of two points with the same name MLflow shows the later.
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
                sink.log(entry.mlflow_id, found, params, new_tags)
                self._metrics_sent += len(found)
            entry.tags, entry.results = tags_digest, entry.results | news
            if folder is None or offsets == entry.offsets:
                return
            entry.offsets = offsets
            entry.tails = {file: describe.tail_digest(folder / file, offsets[file]) or "" for file in REWOUND}
            found, params, new_tags = [], None, {}

    def _save(self) -> None:
        """Write the cursor if it changed; its file's time shows that the mirror makes progress."""
        if (content := repr(self._cursor)) != self._saved:
            write_json_atomic(cursor_path(self._store, self._uri), asdict(self._cursor))
            self._saved = content
        self._saved_sec = time.monotonic()


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
