"""``ablate dashboard`` as a user starts it."""

import json
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request

import psutil
import pytest

from tests.cli.command import ablate
from tests.cli.stored import make_store
from tests.waiting import is_alive, start_ablate, wait_until


@pytest.fixture
def storage(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("MLFLOW")]:
        monkeypatch.delenv(name)
    make_store(tmp_path, "small")
    return tmp_path


def call(storage, *words):
    return ablate("dashboard", "small", "--no-browser", *words, cwd=storage, storage=storage)


def fault(ended):
    assert (ended.code, ended.out) == (2, "")
    [line] = [line for line in ended.err.splitlines() if not line.startswith("Sending")]
    return line


@pytest.mark.exhaustive
def test_a_real_server_shows_the_experiment_and_leaves_no_process(storage):
    words = ("dashboard", "small", "--storage", str(storage), "--no-browser")
    process = start_ablate(*words, stderr=subprocess.PIPE)
    base, _, rest = process.stdout.readline().strip().partition("/#/")
    assert rest.startswith("experiments/1/runs?")
    name = base.removeprefix("http://")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(path, host):
        address = f"http://127.0.0.1:{name.rpartition(':')[2]}/{path}"
        return opener.open(urllib.request.Request(address, headers={"Host": host}))

    get = "2.0/mlflow/experiments/get?experiment_id=1"
    for path in ("api", "ajax-api"):
        with ask(f"{path}/{get}", name) as answer:
            assert json.load(answer)["experiment"]["name"] == "small"
    # Whoever does not know the name gets nothing: not the pages, not an answer, not a run.
    for path in ("", "static-files/index.html", f"api/{get}", "graphql"):
        for other in ("127.0.0.1", "localhost", f"{'0' * 32}.localhost"):
            with pytest.raises(urllib.error.HTTPError, match="403"):
                ask(path, other)
    servers = psutil.Process(process.pid).children(recursive=True)
    assert len(servers) >= 2
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate()
    assert (process.returncode, out) == (0, ""), errors
    assert "Traceback" not in errors
    wait_until(lambda: not any(is_alive(one.pid) for one in servers))


def test_a_port_in_use_and_a_server_that_is_not_there_are_one_line(storage):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} is in use" in fault(call(storage, "--port", str(port)))
    line = fault(call(storage, "--tracking-uri", "http://ann:s3cret@127.0.0.1:9"))
    assert line.startswith("MLflow at http://***@127.0.0.1:9 cannot be used")
    assert "s3cret" not in line
