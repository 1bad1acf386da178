"""The mirror: one writer sends what is new in a study's run store to MLflow, in passes (docs/mlflow.md).

A pass takes one run after the other. It reads the status first, because no rows follow a final status. Then
it sends the rows after the cursor with tags and parameters, the artifacts, and the end. The report itself
comes last.

How it fails: it never raises. A fault is a line in the report, and whatever was not accepted stays unsent for
the next pass. Two mirrors of one study take turns through a lock on the cursor.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, replace
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
    content_digest,
    cursor_lock,
    cursor_path,
    digest,
    is_rewound,
    load_cursor,
    pending,
    state_key,
    store_id,
    tail_digest,
)
from ablate.track.describe import SUMMARY
from ablate.track.sink import STORE_TAG, SUMMARY_TAG, Away, Refused, Sink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from ablate.store import RunDir, State, Status, StudyStore
    from ablate.store.plan_file import LockedArm, LockedPlan
    from ablate.track.describe import Point

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


class Mirror:
    """Sends one study's runs to one tracking store; keep it for several passes, to skip unchanged files.

    ``_known``: MLflow's runs by key, empty until it answers. ``_stamps``: of each run's files when they were
    sent.
    """

    def __init__(self, store: StudyStore, tracking_uri: str) -> None:
        self._store = store
        self._uri = tracking_uri
        self._report = store.path / "report"
        self._cursor = Cursor()
        self._saved = ""
        self._saved_sec = 0.0
        self._forget()

    def _forget(self) -> None:
        self._sink = Sink(self._uri, self._store.path.parent)
        self._known: dict[str, Any] = {}
        self._stamps: dict[str, object] = {}

    def sync_once(self) -> MirrorReport:
        """Send everything that is new since the last pass; never raises for faults of MLflow.

        It may be interrupted; the next pass sends the rest.
        """
        self._problems: list[str] = []
        self._runs_sent = 0
        self._metrics_sent = 0
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
            self._cursor.problem = _one_line(error)
        report = MirrorReport(
            runs_sent=self._runs_sent,
            metrics_sent=self._metrics_sent,
            problem=self._cursor.problem,
            experiment_id=self._cursor.experiment_id if self._known else None,
        )
        if report.problem:  # check everything again: MLflow's content may have changed while it was away
            self._forget()
            report = replace(report, unsent=pending(self._store, self._uri).unsent)
        return report

    def _sync(self) -> None:
        # Before they are read: a change in between is noticed in the next pass.
        report = self._report / "report.json"
        stamp = _stamp([self._store.plan_path, report])
        plan = self._store.plan()
        cursor = self._cursor
        known = {run.info.run_id for run in self._known.values()}
        # Another mirror of this study may have made runs meanwhile.
        if not known or cursor.experiment_id is None or not self._mlflow_ids() <= known:
            self._open(plan.study)
        experiment = str(cursor.experiment_id)
        # First, so that every run can link to it.
        tags = {
            SUMMARY_TAG: "true",
            describe.PLAN_TAG: "current",
            "mlflow.source.name": "ablate",
            "mlflow.runName": f"report: {plan.study}",
            "mlflow.note.content": f"It comes when the study ends; `ablate report {plan.study}` makes it.",
        }
        summary = self._entry(SUMMARY, tags)
        link = f"#/experiments/{experiment}/runs/{summary.mlflow_id}/artifacts/report/report.html"
        note = describe.study_note(plan, report=link)
        view = describe.view(plan)
        if cursor.note != digest(note + view):
            self._sink.describe(experiment, note, view)
            cursor.note = digest(note + view)
        results = describe.read_results(report, stamp.get(report))
        for arm, planned in plan.runs():
            run = self._store.run(planned.id)
            names = (*FILES, "status.json", "environment.json")
            if files := _stamp(run.path / name for name in names):
                tags_of = partial(describe.run_tags, plan, arm, planned, report=link)
                result = results.get(planned.id)
                send = partial(self._send_run, run, plan, arm, tags_of, result)
                self._once(planned.id, (files, stamp, link), send)
        self._mark_earlier({SUMMARY, *(run.id for _, run in plan.runs())})
        pages = _stamp(sorted(self._report.rglob("*")))
        self._once(SUMMARY, pages, partial(self._send_report, summary))
        # a repeated request may have made two: all but one are deleted
        if self._has_new_runs:
            self._sink.known_runs(experiment, store_id(self._store), self._mlflow_ids())

    def _mark_earlier(self, current: set[str]) -> None:
        """Mark the runs that only an earlier plan of the study has: the study's page hides them."""
        for key, entry in self._cursor.runs.items():
            if key not in current and entry.sent.get("tags") != "earlier":
                self._sink.log(entry.mlflow_id, [], {}, {describe.PLAN_TAG: "earlier"})
                entry.sent["tags"] = "earlier"

    def _once(self, key: str, stamp: object, send: Callable[[], None]) -> None:
        """Call ``send`` if the files have changed since they were sent."""
        if self._stamps.get(key) == stamp:
            return
        try:
            send()
            self._stamps[key] = stamp
        except Away:
            raise
        except Exception as error:  # a faulty run must not delay the others
            # Usually the run was deleted in MLflow: the next pass opens it anew, and creates it again.
            self._problems.append(f"run {key}: {_one_line(error)}")
        if time.monotonic() - self._saved_sec > _SAVE_EVERY_SEC:
            self._save()

    def _mlflow_ids(self) -> set[str]:
        return {entry.mlflow_id for entry in self._cursor.runs.values()}

    def _open(self, study: str) -> None:
        """Find the experiment and its runs; drop runs that MLflow no longer has from the cursor."""
        self._forget()
        cursor = self._cursor
        experiment_id = self._sink.experiment(study)
        self._known = self._sink.known_runs(
            experiment_id, store_id(self._store), self._mlflow_ids()
        )
        for key, entry in [*cursor.runs.items()]:
            known = self._known.get(key)
            if known is None or known.info.run_id != entry.mlflow_id:
                del cursor.runs[key]
        if cursor.experiment_id != experiment_id:
            cursor.experiment_id = experiment_id
            cursor.note = ""

    def _entry(
        self,
        key: str,
        tags: Mapping[str, str],
        run: RunDir | None = None,
        started_unix: float | None = None,
        results: Sequence[Point] | None = None,
    ) -> RunCursor:
        """Find or create a run's MLflow run; return its cursor.

        MLflow deletes no points, so a run that was rewound, or of which a report no longer has a result, gets
        a new one.
        """
        entry = self._cursor.runs.get(key)
        is_outdated = False
        if entry is not None and run is not None:
            is_outdated = is_rewound(run, entry)
        elif entry is None and key in self._known:  # the cursor was lost
            known = self._known[key]
            entry = RunCursor(mlflow_id=known.info.run_id, mlflow_status="")
            for name in {*describe.RESULTS} & {*known.data.metrics}:
                entry.sent[name] = repr(known.data.metrics[name])
            is_outdated = run is not None and not self._holds_points_of(run, entry)
        if entry is not None and results is not None:
            held = set(describe.RESULTS) & set(entry.sent)
            is_outdated |= not held <= {point.key for point in results}
        if entry is None or is_outdated:
            if entry is not None:
                self._sink.delete_run(entry.mlflow_id)
            owned = {STORE_TAG: store_id(self._store), **tags}
            created = self._sink.create_run(
                str(self._cursor.experiment_id), started_unix, owned
            )
            self._known[key] = created
            self._has_new_runs = True
            entry = RunCursor(
                mlflow_id=created.info.run_id,
                sent={"tags": digest(sorted(tags.items()))},
            )
        self._cursor.runs[key] = entry
        return entry

    def _holds_points_of(self, run: RunDir, entry: RunCursor) -> bool:
        """Whether all points of losses in MLflow are in the run's file."""
        in_file = set()
        for row in run.metrics():
            for point in describe.points(row):
                in_file.add((point.step, point.timestamp_ms))
        in_mlflow = self._sink.history(entry.mlflow_id, "train_loss")
        in_mlflow |= self._sink.history(entry.mlflow_id, "val_loss")
        return in_mlflow <= in_file

    def _send_run(
        self,
        run: RunDir,
        plan: LockedPlan,
        arm: LockedArm,
        tags_of: Callable[[Status, dict[str, Any]], dict[str, str]],
        results: Sequence[Point] | None,
    ) -> None:
        """Send a run's new rows, tags, parameters and results; then its artifacts and its end."""
        self._runs_sent += 1
        status = run.examined()
        if status.state == "damaged":
            self._problems.append(f"run {run.run_id} is not sent: {status.message}")
            return
        tags = tags_of(status, run.environment())
        entry = self._entry(run.run_id, tags, run, status.started_unix, results)
        params: dict[str, str] = {}
        if "params" not in entry.sent:
            params = describe.run_params(run.config(), plan, arm)
            for key in self._known[run.run_id].data.params:
                params.pop(key, None)
        tags_digest = digest(sorted(tags.items()))
        if entry.sent.get("tags") == tags_digest:
            tags = {}
        points = []
        shown = {}
        for point in results or ():
            shown[point.key] = repr(point.value)
            if entry.sent.get(point.key) != shown[point.key]:
                points.append(point)
        while True:
            offsets = {}
            for file in FILES:
                points_of_file, offsets[file] = describe.read_points(
                    run.path / file, entry.offsets[file], _CHUNK_BYTES, plan.loss_unit
                )
                points += points_of_file
            if points or params or tags:
                self._sink.log(entry.mlflow_id, points, params, tags)
                self._metrics_sent += len(points)
            entry.sent |= {"params": "", "tags": tags_digest, **shown}
            if offsets == entry.offsets:
                break
            entry.offsets = offsets
            entry.tails = {
                file: tail_digest(run.path / file, offsets[file]) or ""
                for file in REWOUND
            }
            params = {}
            tags = {}
            points = []
        for name in _ARTIFACTS:
            if (run.path / name).exists():
                self._send_artifact(run.run_id, entry, run.path / name)
        if entry.sent.get("state") != state_key(status):
            mlflow_status = _MLFLOW_STATUS[status.state]
            if mlflow_status != "RUNNING" or entry.mlflow_status != "RUNNING":
                ended_unix = status.ended_unix or status.updated_unix
                self._sink.set_state(entry.mlflow_id, mlflow_status, ended_unix)
            entry.mlflow_status = mlflow_status
            entry.sent["state"] = state_key(status)

    def _send_report(self, entry: RunCursor) -> None:
        if not (self._report / "report.html").exists():
            return
        self._send_artifact(SUMMARY, entry, self._report)
        if entry.mlflow_status != "FINISHED":
            self._sink.set_state(entry.mlflow_id, "FINISHED", None)
            entry.mlflow_status = "FINISHED"

    def _send_artifact(self, key: str, entry: RunCursor, path: Path) -> None:
        """Send a file or folder if it has changed."""
        if (content := content_digest(path)) != entry.sent.get(path.name):
            self._sink.log_artifact(self._known[key], path)
            entry.sent[path.name] = content

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


def _stamp(paths: Iterable[Path]) -> dict[Path, tuple[int, int, int]]:
    """Return a value that changes whenever one of the files does; empty if there is none."""
    stamps = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            stamps[path] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return stamps
