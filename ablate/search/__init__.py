"""Explorations: trials before or instead of a study's runs, chosen by Optuna from what earlier ones showed.

A trial is one or more ordinary runs; Optuna's storage is the ledger of what was asked and told, the run store
the truth about what was trained.
"""
