"""Searches: trials before or instead of a study's runs, chosen by Optuna from the results of earlier ones.

A trial is one or more ordinary runs. Optuna's storage is the ledger of trials, and the run store is the truth
about training.
"""
