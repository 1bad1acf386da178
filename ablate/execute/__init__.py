"""Execution: Ray tasks over the run store, progress, interruption."""

from ablate.execute.progress import ProgressReader, RunProgress, count_states

__all__ = ["ProgressReader", "RunProgress", "count_states"]
