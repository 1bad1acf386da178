"""The shared trainer. ``train(config, on_metrics)`` runs one run, wherever it is called from."""

from ablate.store.checkpoints import Snapshot
from ablate.train.loop import TrainResult, train
from ablate.train.snapshot import Checkpoints

__all__ = ["Checkpoints", "Snapshot", "TrainResult", "train"]
