"""Ablations of low-precision training: which GEMM can run in FP4, with which stabiliser, at what cost."""

from typing import TYPE_CHECKING, Any

from ablate._version import __version__

if TYPE_CHECKING:
    from ablate.reports.open_study import open_study
    from ablate.workflow.train_run import train_run

__all__ = ["__version__", "open_study", "train_run"]


def __getattr__(name: str) -> Any:
    # Not at the top: they need pandas, SciPy or torch, and most commands do not.
    if name == "open_study":
        from ablate.reports.open_study import open_study

        return open_study
    if name == "train_run":
        from ablate.workflow.train_run import train_run

        return train_run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
