"""Whether the error of quantised GEMMs is structured or random, and how much of it reaches the gradient.

Uses no files, Ray or MLflow; needs torch. docs/diagnostics.md defines every figure.
"""
