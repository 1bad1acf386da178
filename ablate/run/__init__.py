"""What one run is: its configuration, its identity, its schedule, and how it ended."""
