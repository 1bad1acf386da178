"""What every other part stands on: errors, JSON, atomic files, cache folder, umask, hashes of functions."""
