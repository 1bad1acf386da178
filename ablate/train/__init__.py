"""The shared trainer. ``train(config, on_metrics)`` runs one run, wherever it is called from."""

from ablate.train.loop import TrainResult, train

__all__ = ["TrainResult", "train"]
