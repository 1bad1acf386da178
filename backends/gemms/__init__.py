"""Who multiplies: each module is one back end."""
