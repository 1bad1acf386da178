"""What every other part uses: errors, JSON, files, cache folder, umask, code hashes, sections."""
