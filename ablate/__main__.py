"""``python -m ablate`` is the same as ``ablate``."""

import signal

# Until the command line is there, Ctrl-C ends the process, without a traceback from the midst of an import.
_before = signal.signal(signal.SIGINT, signal.SIG_DFL)
from ablate.cli import main  # noqa: E402  after the signal

signal.signal(signal.SIGINT, _before)

if __name__ == "__main__":
    main()
