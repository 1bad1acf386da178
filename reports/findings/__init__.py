"""What the runs of a study show, as plain data."""
