"""Logs that others wrote → an ordinary run store, so that reports and MLflow work on them."""
