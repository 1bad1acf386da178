"""What every other part stands on: errors, JSON, files, cache folder, umask, code hashes, sections."""
