"""MLflow away, slow, or over PostgreSQL: in the end it holds every point once."""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import requests

from ablate.track.cursor import cursor_path, load_cursor, pending
from ablate.track.mirror import Mirror
from ablate.track.process import start_mirror
from ablate.track.server import local_server
from tests.waiting import wait_until


def write_third(study, third):
    for arm, seed in study.runs:
        if not third:
            study.start(arm, seed)
        steps = range(40 * third + 1, 40 * third + 41)
        study.train(steps, arm, seed)
        study.sample(steps[::10], arm, seed)
        if third == 2:
            study.end(arm, seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("away", range(3), ids=("first", "middle", "last"))
def test_away_for_a_third_of_a_study(make_study, server, door, held, assert_same, away, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    study = make_study(name=f"away {away}")
    mirror = Mirror(study.store, door.url)
    for third in range(3):
        (door.shut if third == away else door.open)()
        write_third(study, third)
        report = mirror.sync_once()
        assert (report.problem is not None) == (third == away)
        assert bool(report.unsent) == (third == away)
    door.open()
    assert mirror.sync_once().problem is None
    assert pending(study.store, door.url).complete
    assert_same(study, held(study, server))
    assert all(run.info.status == "FINISHED" for run in held(study, server).values())


@pytest.mark.exhaustive
def test_the_process_catches_up_by_itself(make_study, server, door, held, assert_same):
    study = make_study(name="catches up")
    write_third(study, 0)
    door.shut()
    mirror = start_mirror(study.store.path, door.url)
    try:
        wait_until(lambda: load_cursor(study.store, door.url).problem)
        write_third(study, 1)
        door.open()
        wait_until(lambda: pending(study.store, door.url).complete)
        write_third(study, 2)
        assert mirror.stop().complete
        assert_same(study, held(study, server))
    finally:
        mirror.process.kill()


@pytest.mark.exhaustive
def test_a_slow_server_is_served_late_and_whole(make_study, server, door, held, assert_same):
    study = make_study(name="slowly").whole(60)
    door.wait_sec = 0.1
    began = time.monotonic()
    assert Mirror(study.store, door.url).sync_once().problem is None
    assert time.monotonic() - began > 1  # it was slow indeed
    assert_same(study, held(study, server))


def postgres_programs():
    folders = [Path(found).resolve().parent for found in [shutil.which("initdb")] if found]
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return next((folder for folder in folders if (folder / "postgres").exists()), None)


@pytest.fixture
def postgres(free_port):
    """The address of an empty PostgreSQL database on loopback, with a password."""
    programs = postgres_programs()
    if programs is None:
        pytest.skip("needs PostgreSQL's server (Debian: postgresql)")
    # Not among pytest's folders: those are closed to others, and PostgreSQL has a user of its own.
    folder = Path(tempfile.mkdtemp(prefix="ablate-postgres-"))
    data, secret = folder / "data", folder / "secret"
    secret.write_text("s3cret")
    owner = {}
    if os.geteuid() == 0:  # it refuses to run as root
        user = pwd.getpwnam("postgres")
        owner = {"user": user.pw_uid, "group": user.pw_gid}
        for path in (folder, secret):
            os.chown(path, user.pw_uid, user.pw_gid)

    def call(*command):
        return subprocess.run(command, check=True, capture_output=True, cwd=folder, **owner)

    call(
        programs / "initdb", "-D", data, "-U", "ann", "-A", "scram-sha-256", f"--pwfile={secret}", "--no-sync"
    )
    options = f"-p {free_port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -c fsync=off"
    call(programs / "pg_ctl", "-D", data, "-l", folder / "log", "-w", "-o", options, "start")
    try:
        yield f"postgresql://ann:s3cret@127.0.0.1:{free_port}/postgres"
    finally:
        call(programs / "pg_ctl", "-D", data, "-m", "immediate", "stop")
        shutil.rmtree(folder)


@pytest.mark.exhaustive
def test_postgresql(study, postgres, held, assert_same, tmp_path, storage):
    """Directly and through a server with local artifacts, the one after the other: the same runs."""
    write_third(study, 0)
    direct = Mirror(study.store, postgres)
    assert direct.sync_once().problem is None
    write_third(study, 1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with local_server(postgres, tmp_path / "artifacts", tmp_path / "log", port) as (url, _):
        served = Mirror(study.store, url)
        assert served.sync_once().problem is None
        write_third(study, 2)
        assert served.sync_once().problem is None
        assert_same(study, held(study, url))
    assert direct.sync_once().problem is None
    assert_same(study, held(study, postgres))
    assert list(storage.glob("mlartifacts/synthetic/*/artifacts/config.json"))
    kept = [path for folder in (study.store.path, tmp_path) for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in kept if b"s3cret" in path.read_bytes()]


class Gateway(ThreadingHTTPServer):
    """The way to a server; it carries out what it is asked, and loses the answers to ``runs/create``."""

    def __init__(self, server, how):
        super().__init__(("127.0.0.1", 0), _Passing)
        self.behind, self.how, self.loses = server, how, 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _pass(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {key: self.headers[key] for key in ("Content-Type", "Authorization") if key in self.headers}
        answer = requests.request(
            self.command, self.server.behind + self.path, data=body, headers=headers, timeout=60
        )
        status = answer.status_code
        if self.path.endswith("runs/create") and self.server.loses:
            self.server.loses -= 1
            if self.server.how == "drop":
                self.close_connection = True
                return
            status = 500
        self.send_response(status)
        self.send_header("Content-Type", answer.headers.get("Content-Type", "application/json"))
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _pass  # noqa: N815 - the names that http.server calls

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("how", ["drop", "500"])
def test_a_lost_answer_to_runs_create_doubles_no_run(make_study, server, held, summary, assert_same, how):
    study = make_study(name=f"lost answers, {how}").whole()
    with Gateway(server, how) as gateway:
        mirror = Mirror(study.store, gateway.url)
        for _ in range(12):  # each pass loses one answer
            gateway.loses = 1
            mirror.sync_once()
        gateway.loses = 0
        assert mirror.sync_once().problem is None
        gateway.shutdown()
    assert_same(study, held(study, server))
    assert all(run.info.status == "FINISHED" for run in held(study, server).values())
    assert summary(study, server)


def test_two_runs_of_one_id_become_one_also_when_rebuilt(study, held, assert_same, storage):
    from mlflow import MlflowClient

    uri = f"sqlite:///{storage / 'mlflow.db'}"
    study.whole()
    Mirror(study.store, uri).sync_once()
    (first, *_) = held(study, uri).values()
    client = MlflowClient(uri)
    for rebuilt in (False, True):
        client.create_run(first.info.experiment_id, tags=dict(first.data.tags))
        if rebuilt:
            cursor_path(study.store, uri).unlink()
        assert Mirror(study.store, uri).sync_once().problem is None
        assert_same(study, held(study, uri))
    assert first.info.run_id in {run.info.run_id for run in held(study, uri).values()}
