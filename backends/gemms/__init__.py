"""GEMMs: each module is one back end."""
