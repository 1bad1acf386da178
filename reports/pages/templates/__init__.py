"""Templates of the pages. A package, so that its files are part of the wheel."""
