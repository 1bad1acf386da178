"""The shared trainer. ``train(config, on_metrics)`` runs one run, wherever it is called from."""

from ablate.train.loop import TrainResult, train
from ablate.train.snapshot import Checkpoints, Snapshot

__all__ = ["Checkpoints", "Snapshot", "TrainResult", "train"]
