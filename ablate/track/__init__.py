"""Mirroring of the run store to MLflow. Neither this module nor training imports MLflow.

Training appends to its run's files. One mirror process per study reads them and writes to MLflow: one writer
with large batches is faster than many, and a slow or missing server delays no run.
"""

from ablate.track.cursor import MirrorReport, pending
from ablate.track.launch import MirrorProcess, start_mirror
from ablate.track.mirror import Mirror
from ablate.track.uri import default_tracking_uri, redact, resolve_tracking_uri

__all__ = [
    "Mirror",
    "MirrorProcess",
    "MirrorReport",
    "default_tracking_uri",
    "pending",
    "redact",
    "resolve_tracking_uri",
    "start_mirror",
]
