"""Logs of other programs as runs of a study; a study read against another arm or target."""
