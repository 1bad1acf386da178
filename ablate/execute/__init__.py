"""Execution: the runs of a plan as Ray tasks, their progress, and interruption."""
