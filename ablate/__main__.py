"""``python -m ablate`` is the same as ``ablate``."""

from ablate.cli import main

if __name__ == "__main__":
    main()
