"""Checks whether Ray's head node still answers.

Ray itself waits for a minute and then ends the driver's process without a useful message. The driver
therefore checks first.

How it fails: it raises nothing; a head that cannot be reached is the case that it reports.
"""

from __future__ import annotations

import socket
import time

GONE_AFTER_SEC = 20.0
_LOOK_EVERY_SEC = 2.0
_PATIENCE_SEC = 2.0


class Head:
    """The head at ``address`` (``host:port``), checked now and then."""

    def __init__(self, address: str, *, gone_after_sec: float = GONE_AFTER_SEC) -> None:
        host, _, port = address.rpartition(":")
        self._address = address
        self._where = (host.strip("[]"), int(port))
        self._gone_after_sec = gone_after_sec
        self._looked = time.monotonic()
        self._answered: float | None = None

    def is_gone(self) -> bool:
        """Whether the head answered before, but has not for too long to come back by itself.

        A head that never answers may be behind a proxy through which Ray itself reaches it.
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
