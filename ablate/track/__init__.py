"""Mirroring of the run store to MLflow (docs/mlflow.md).

Importing this package, or training, does not import MLflow.
"""
