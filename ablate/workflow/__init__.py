"""Whole jobs as plain calls: a verb of the command line without its options and its printing.

A ``Listener`` is told what happens; the default says nothing, and the command line's prints.
"""
