"""Where MLflow's own server listens."""

import socket

import pytest

from ablate.base.errors import UserError
from ablate.track import server
from tests.waiting import has_ipv6


@pytest.mark.skipif(not has_ipv6(), reason="needs the address [::1]")
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_stranger_on_either_loopback_address(address, monkeypatch):
    """A browser would ask him first, and tell him the name that is the key."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as stranger:
        port = stranger.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} is in use"):
            server.listen(port)
        monkeypatch.setattr(server, "DEFAULT_PORT", port)
        sockets = server.listen(None)
    addresses = {each.getsockname()[:2] for each in sockets}
    [number] = {port for _, port in addresses}
    assert addresses == {("127.0.0.1", number), ("::1", number)}
    assert number != port
    for each in addresses:  # nor can he come later
        with pytest.raises(OSError, match="in use"):
            socket.create_server(
                each, family=socket.AF_INET6 if ":" in each[0] else socket.AF_INET
            )
    for each in sockets:
        each.close()
