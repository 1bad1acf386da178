"""How the runs of a study ended, what they cost over the baseline, and which runs are no longer needed."""
