"""Studies that come with the package; ``ablate run NAME`` finds them from anywhere."""
