"""Execution: the runs of a plan as Ray tasks, their progress, and interruption."""

from ablate.execute.progress import ProgressReader, RunProgress, count_states

__all__ = ["ProgressReader", "RunProgress", "count_states"]
