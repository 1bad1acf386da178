"""Whether the error of quantised GEMMs is structured or random, and how much of it reaches the gradient.

Pure of files, Ray and MLflow; needs torch. See docs/diagnostics.md for every figure's definition.
"""
