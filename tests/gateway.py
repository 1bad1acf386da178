"""A server on loopback that stands before another one, or answers what a test says."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests


class Gateway(ThreadingHTTPServer):
    """The way to a server. Shut, it ends every connection; it can answer late, and lose answers.

    ``loses``: so many of the next answers to ``runs/create`` are lost after the run was made, by the end of
    the connection or (``status``) as a fault of the server. Without a server behind it answers ``status`` and
    ``content``.
    """

    daemon_threads = True

    def __init__(self, server=None):
        super().__init__(("127.0.0.1", 0), _Passing)
        self.behind, self.is_open, self.wait_sec, self.loses, self.status = (
            server,
            True,
            0.0,
            0,
            None,
        )
        self.content = b"an answer that is no MLflow's"
        self.asked = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _pass(self):
        way = self.server
        if not way.is_open:
            self.close_connection = True
            return
        way.asked.append(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        time.sleep(way.wait_sec)
        status, content = way.status, way.content
        if way.behind is not None:
            headers = {
                key: self.headers[key]
                for key in ("Content-Type",)
                if key in self.headers
            }
            answer = requests.request(
                self.command, way.behind + self.path, data=body, headers=headers
            )
            status, content = answer.status_code, answer.content
            if self.path.endswith("runs/create") and way.loses:
                way.loses -= 1
                if way.status is None:
                    self.close_connection = True
                    return
                status = way.status
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _pass  # noqa: N815 - the names that http.server calls

    def log_message(self, *_):
        pass

    def handle(self):
        try:
            super().handle()
        except OSError:  # the client is impatient
            self.close_connection = True


@pytest.fixture
def gateway():
    """Make a way to a server, or a server that answers nothing but a status."""
    made = []

    def make(server=None):
        made.append(Gateway(server))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()
        one.server_close()
