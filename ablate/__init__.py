"""Ablations of low-precision training: which GEMM can run in FP4, with which stabiliser, at what cost."""

from ablate._version import __version__

__all__ = ["__version__"]
