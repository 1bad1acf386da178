"""Whole jobs as plain calls: what a verb of the command line does between its options and its printing.

A ``Listener`` is told what happens; the default says nothing, and the command line's prints.
"""
