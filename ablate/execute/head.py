"""Whether Ray's head node still answers.

Ray itself waits for a minute and then ends the driver's process from within, without a word that says what to
do. So the driver looks first.

How it fails: it does not; a head that cannot be reached is what it is for.
"""

from __future__ import annotations

import socket
import time

GONE_AFTER_SEC = 20.0
_LOOK_EVERY_SEC = 2.0
_PATIENCE_SEC = 2.0


class Head:
    """The head at ``address`` (``host:port``), looked at now and then."""

    def __init__(self, address: str, *, gone_after_sec: float = GONE_AFTER_SEC) -> None:
        host, _, port = address.rpartition(":")
        self._address = address
        self._where = (host.strip("[]"), int(port))
        self._gone_after_sec = gone_after_sec
        self._looked = time.monotonic()
        self._answered: float | None = None

    def is_gone(self) -> bool:
        """Return whether it has answered before, and not for so long that it will not come back by itself.

        One that never answers may be behind a proxy through which Ray itself reaches it.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK_EVERY_SEC:
            return False
        self._looked = now
        try:
            socket.create_connection(self._where, timeout=_PATIENCE_SEC).close()
        except OSError:
            return self._answered is not None and now - self._answered > self._gone_after_sec
        self._answered = now
        return False

    def raise_if_gone(self) -> None:
        """Raise ``ConnectionError`` if it is gone."""
        if self.is_gone():
            raise ConnectionError(f"Ray's head node at {self._address} does not answer any more")
