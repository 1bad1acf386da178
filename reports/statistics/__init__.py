"""Statistics on plain numbers and frames: no files, no words, no pictures."""
