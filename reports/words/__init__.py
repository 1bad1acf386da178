"""Numbers and findings as sentences and tables."""
