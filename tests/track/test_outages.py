"""MLflow's server away, ill, slow, or over PostgreSQL: in the end it holds every point once."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest

from ablate.base.errors import UserError
from ablate.track.cursor import load_cursor, pending, private_dir
from ablate.track.mirror import Mirror
from ablate.track.process import start_mirror
from ablate.track.server import listen, local_server
from tests.execute.heads import free_port
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "120")


def files_with(secret, folder):
    files = filter(Path.is_file, folder.rglob("*"))
    return [path for path in files if secret in path.read_bytes()]


def write_third(study, third):
    study.whole(40 * third + 40, since=40 * third, is_last=third == 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("away", range(3), ids=("first", "middle", "last"))
def test_away_for_a_third_of_a_study(make_study, server, gateway, away):
    study = make_study(name=f"away {away}")
    way = gateway(server)
    mirror = Mirror(study.store, way.url)
    for third in range(3):
        way.is_open = third != away
        write_third(study, third)
        report = mirror.sync_once()
        assert (report.problem is not None) == bool(report.unsent) == (third == away)
    way.is_open = True
    way.wait_sec = 0.05  # slow as well
    assert mirror.sync_once().problem is None
    assert pending(study.store, way.url).complete
    assert {run.info.status for run in study.check(server).values()} == {"FINISHED"}


@pytest.mark.exhaustive
def test_the_process_catches_up_by_itself(make_study, server, gateway):
    study = make_study(name="catches up")
    way = gateway(server)
    url = way.url.replace("//", "//ann:s3cret@")
    write_third(study, 0)
    way.is_open = False
    mirror = start_mirror(study.store.path, url)
    try:
        wait_until(lambda: load_cursor(study.store, url).problem)
        command_line = Path(f"/proc/{mirror.process.pid}/cmdline").read_bytes()
        write_third(study, 1)
        way.is_open = True
        wait_until(lambda: pending(study.store, url).complete)
        way.is_open = False
        write_third(study, 2)
        report = mirror.stop(300)
        assert mirror.process.returncode == 0  # it has ended by itself
        assert len(report.unsent) == 4
    finally:
        mirror.process.kill()
    log = (private_dir(study.store) / "mirror.log").read_bytes()
    for words in (b"will try again", b"all is sent again", b"ended with 4 unsent"):
        assert words in log
    assert b"s3cret" not in log + command_line + report.problem.encode()
    way.is_open = True
    assert Mirror(study.store, url).sync_once().complete
    study.check(server)


@pytest.mark.exhaustive
def test_the_process_goes_on_after_it_was_stopped(make_study, uri):
    study = make_study(name="stopped")
    write_third(study, 0)
    mirror = start_mirror(study.store.path, uri)
    try:
        wait_until(lambda: pending(study.store, uri).complete, mirror.process)
        mirror.process.send_signal(signal.SIGSTOP)
        time.sleep(3)
        mirror.process.send_signal(signal.SIGCONT)
        time.sleep(1)
        write_third(study, 1)
        wait_until(lambda: pending(study.store, uri).complete, mirror.process)
        write_third(study, 2)
        assert mirror.stop().complete
    finally:
        mirror.process.kill()
    study.check(uri)


@pytest.mark.parametrize("status", [None, 500])
def test_a_lost_answer_to_runs_create_doubles_no_run(
    make_study, server, gateway, status, monkeypatch
):
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES")
    study = make_study(name=f"lost answers, {status}").whole()
    way = gateway(server)
    mirror = Mirror(study.store, way.url)
    way.status = status
    for _ in range(12):  # each pass loses one answer
        way.loses = 1
        mirror.sync_once()
    way.loses = 0
    assert mirror.sync_once().problem is None
    assert {run.info.status for run in study.check(server).values()} == {"FINISHED"}


ADDRESSES = (
    "http://ann:s3cret@127.0.0.1:9",
    "htp://ann:s3cret@host",
    "sqlite:////proc/none/mlflow.db",
)


@pytest.mark.parametrize("where", [200, 401, 404, 503, *ADDRESSES])
def test_an_ill_server_or_an_address_that_cannot_be_used_is_one_line(
    study, gateway, where
):
    study.whole(2)
    if isinstance(where, int):
        way = gateway()
        way.status = where
        where = way.url.replace("//", "//ann:s3cret@")
    report = Mirror(study.store, where).sync_once()
    assert report.problem
    assert len(report.unsent) == 4
    assert pending(study.store, where).problem == report.problem
    assert "s3cret" not in repr(report)
    assert not files_with(b"s3cret", study.store.path)
    study.store.plan_path.unlink()
    assert pending(study.store, where).unsent == ()


def test_a_server_that_hangs_costs_one_request(study, gateway, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    study.whole(4)
    way = gateway()
    way.status = 200
    way.wait_sec = 6.0
    assert Mirror(study.store, way.url).sync_once().problem
    # asked again as MLflow's client does, and not for each run
    assert len(set(way.asked)) == 1


@pytest.mark.exhaustive
def test_a_server_that_cannot_start(tmp_path):
    with (
        pytest.raises(UserError, match="ended at once"),
        local_server("nonsense://x", tmp_path, tmp_path / "logs" / "log", listen(None)),
    ):
        pass


@pytest.fixture
def postgres_server():
    """The address of an empty PostgreSQL database on loopback, with a password; how to start and stop it."""
    paths = os.pathsep.join(
        [os.environ["PATH"], *map(str, Path("/usr/lib/postgresql").glob("*/bin"))]
    )
    initdb = shutil.which("initdb", path=paths)
    if initdb is None:
        pytest.skip("needs PostgreSQL's server (Debian: postgresql)")
    programs = Path(initdb).resolve().parent
    # Not among pytest's folders: those are closed to others, and PostgreSQL has a user of its own.
    folder = Path(tempfile.mkdtemp(prefix="ablate-postgres-"))
    port = free_port()
    data = folder / "data"
    secret = folder / "secret"
    secret.write_text("s3cret")
    owner = {}
    if os.geteuid() == 0:  # it refuses to run as root
        user = pwd.getpwnam("postgres")
        owner = {"user": user.pw_uid, "group": user.pw_gid}
        for path in (folder, secret):
            os.chown(path, user.pw_uid, user.pw_gid)

    def call(program, *options):
        command = [programs / program, "-D", data, *options]
        subprocess.run(command, check=True, capture_output=True, cwd=folder, **owner)

    call("initdb", "-Uann", "-Ascram-sha-256", f"--pwfile={secret}", "--no-sync")
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -c fsync=off"
    start = partial(call, "pg_ctl", "-l", folder / "log", "-w", "-o", options, "start")
    stop = partial(call, "pg_ctl", "-m", "immediate", "stop")
    start()
    try:
        yield f"postgresql://ann:s3cret@127.0.0.1:{port}/postgres", start, stop
    finally:
        stop()
        shutil.rmtree(folder)


@pytest.mark.exhaustive
def test_postgresql_away_is_one_line_of_the_log(make_study, postgres_server):
    study = make_study(name="away")
    uri, start, stop = postgres_server
    write_third(study, 0)
    mirror = start_mirror(study.store.path, uri)
    try:
        wait_until(lambda: pending(study.store, uri).complete, mirror.process)
        stop()
        for third in (1, 2):
            write_third(study, third)
            time.sleep(8)
        start()
        wait_until(lambda: pending(study.store, uri).complete, mirror.process)
    finally:
        mirror.stop()
    log = (private_dir(study.store) / "mirror.log").read_text()
    first, away, back = log.splitlines()
    assert "mirroring" in first
    assert "will try again: MlflowException" in away
    assert "all is sent again" in back


@pytest.mark.exhaustive
def test_postgresql(study, postgres_server, tmp_path, storage):
    """Directly and through a server with local artifacts, the one after the other: the same runs."""
    postgres, *_ = postgres_server
    direct = Mirror(study.store, postgres)
    write_third(study, 0)
    assert direct.sync_once().problem is None
    log = tmp_path / "logs" / "log"
    with local_server(postgres, tmp_path / "artifacts", log, listen(None)) as (url, _):
        served = Mirror(study.store, url)
        for third in (1, 2):
            write_third(study, third)
            assert served.sync_once().problem is None
        study.check(url)
    assert direct.sync_once().problem is None
    study.check(postgres)
    assert list(storage.glob("mlartifacts/synthetic/*/artifacts/config.json"))
    assert not files_with(b"s3cret", tmp_path)
