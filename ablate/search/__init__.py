"""Searches: trials before or instead of a study's runs, chosen by Optuna from the results of earlier ones."""
