"""Mirroring of the run store to MLflow, which neither this module nor training imports (docs/mlflow.md)."""
