"""``ablate dashboard`` as a user starts it."""

import contextlib
import json
import os
import signal
import socket
import sqlite3
import stat
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.cli.command import ablate
from tests.cli.stored import make_store
from tests.waiting import has_ipv6, is_alive, start_ablate, wait_until


@pytest.fixture
def storage(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("MLFLOW")]:
        monkeypatch.delenv(name)
    make_store(tmp_path, "small")
    return tmp_path


def call(storage, *words):
    return ablate("dashboard small --no-browser", *words, cwd=storage, storage=storage)


def fault(ended):
    assert (ended.code, ended.out) == (2, "")
    [line] = [line for line in ended.err.splitlines() if not line.startswith("Sending")]
    return line


@pytest.fixture
def dashboard(storage):
    """Start ``ablate dashboard``; give the process, and a function that asks its server as a host's name."""
    started = time.time()
    # A browser that keeps what it is told to open.
    environment = os.environ | {"DISPLAY": ":9", "BROWSER": "true"}
    words = ("dashboard", "small", "--storage", str(storage))
    process = start_ablate(*words, stderr=subprocess.PIPE, umask=0o022, env=environment)
    base, _, rest = process.stdout.readline().strip().partition("/#/")
    assert rest.startswith("experiments/1/runs?")
    name = base.removeprefix("http://")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(path, host=name, address="127.0.0.1", **content):
        url = f"http://{address}:{name.rpartition(':')[2]}/{path}"
        data = json.dumps(content).encode() if content else None
        headers = {"Host": host, "Content-Type": "application/json"}
        return opener.open(urllib.request.Request(url, data=data, headers=headers))

    yield SimpleNamespace(
        process=process, ask=ask, key=name.partition(".")[0].encode(), started=started
    )
    process.kill()


EXPERIMENT = "2.0/mlflow/experiments/get?experiment_id=1"


@pytest.mark.exhaustive
def test_a_real_server_shows_the_experiment_and_leaves_no_process(dashboard):
    addresses = ["127.0.0.1", *["[::1]"] * has_ipv6()]
    for address in addresses:
        for path in ("api", "ajax-api"):
            with dashboard.ask(f"{path}/{EXPERIMENT}", address=address) as answer:
                assert json.load(answer)["experiment"]["name"] == "small"
        # Whoever does not know the name gets nothing: not the pages, not an answer, not a run.
        for path in ("", "static-files/index.html", f"api/{EXPERIMENT}", "graphql"):
            for other in ("127.0.0.1", "localhost", f"{'0' * 32}.localhost"):
                with pytest.raises(urllib.error.HTTPError, match="403"):
                    dashboard.ask(path, other, address)
    process = dashboard.process
    servers = psutil.Process(process.pid).children(recursive=True)
    assert servers
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate()
    assert (process.returncode, out) == (0, ""), errors
    assert "Traceback" not in errors
    wait_until(lambda: not any(is_alive(one.pid) for one in servers))


@pytest.mark.exhaustive
def test_nobody_else_can_read_the_key(dashboard, storage):
    """In files of the storage and of /tmp that others can reach, and in the titles of processes."""
    with pytest.raises(urllib.error.HTTPError, match="403"):  # a line of the log
        dashboard.ask("", f"{dashboard.key.decode()}.localhost.example")
    [log] = storage.rglob("server.log")
    wait_until(lambda: b"Rejected" in log.read_bytes())
    assert (log.stat().st_mode & 0o777, log.parent.stat().st_mode & 0o777) == (
        0o600,
        0o700,
    )
    holders = [
        path
        for path in storage.rglob("*")
        if path.is_file() and dashboard.key in path.read_bytes()
    ]
    # the browser's, while it is open
    assert [path.name for path in holders] == ["pages.html"]
    assert holders[0].stat().st_mode & 0o777 == 0o600
    for path in (
        *new_files("/tmp", dashboard.started),
        *Path("/proc").glob("[0-9]*/cmdline"),
    ):
        with contextlib.suppress(OSError):  # it has ended, or is gone
            assert path in holders or dashboard.key not in path.read_bytes(), path
    dashboard.process.send_signal(signal.SIGHUP)
    dashboard.process.communicate()
    assert not holders[0].exists()


def new_files(folder, since):
    """Yield the files of a folder that were written since then."""
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            with contextlib.suppress(OSError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode) and status.st_mtime >= since - 1:
                    yield path


@pytest.mark.exhaustive
def test_whoever_has_the_key_writes_into_the_artifacts_of_the_storage_alone(
    dashboard, storage, short
):
    """An experiment elsewhere is refused, and one that is there already is not written to or read from."""
    ask = dashboard.ask
    (short / "secret.txt").write_text("secret")
    with sqlite3.connect(storage / "mlflow.db") as database:
        database.execute(
            "UPDATE experiments SET artifact_location = ?", [short.as_uri()]
        )
    planted = json.load(ask("api/2.0/mlflow/runs/create", experiment_id="1"))["run"][
        "info"
    ]
    assert planted["artifact_uri"].startswith(short.as_uri())
    run = planted["run_id"]
    with pytest.raises(urllib.error.HTTPError, match="400"):
        ask(f"ajax-api/2.0/mlflow/upload-artifact?run_uuid={run}&path=planted", a="b")
    for way in (
        "get-artifact?path=secret.txt&run_uuid=",
        "api/2.0/mlflow/artifacts/list?run_id=",
    ):
        with pytest.raises(urllib.error.HTTPError):
            ask(way + run)
    for number, place in enumerate(
        (short.as_uri(), str(short), "s3://bucket/x", "mlflow-artifacts:/../..")
    ):
        for word in ("artifact_location", "artifactLocation"):
            with pytest.raises(urllib.error.HTTPError, match="400"):
                ask(
                    "api/2.0/mlflow/experiments/create",
                    name=f"{word}{number}",
                    **{word: place},
                )
    for path in (
        "ajax-api/3.0/mlflow/assistant/config",
        "gateway/x/mlflow/invocations",
    ):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            ask(path)
    assert [path.name for path in short.rglob("*")] == ["secret.txt"]
    ask("api/2.0/mlflow/experiments/create", name="mine").close()
    run = json.load(ask("api/2.0/mlflow/runs/create", experiment_id="2"))["run"][
        "info"
    ]["run_id"]
    # the test can fail
    ask(f"ajax-api/2.0/mlflow/upload-artifact?run_uuid={run}&path=file", a="b").close()
    assert list(storage.rglob(f"mlartifacts/**/{run}/artifacts/file"))


def test_a_port_in_use_and_a_server_that_is_not_there_are_one_line(storage):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} is in use" in fault(call(storage, "--port", str(port)))
    line = fault(call(storage, "--tracking-uri", "http://ann:s3cret@127.0.0.1:9"))
    assert line.startswith("MLflow at http://***@127.0.0.1:9 cannot be used")
    assert "s3cret" not in line
