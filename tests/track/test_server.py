"""The mirror against a real MLflow server on loopback, and against servers that are ill."""

import contextlib
import http.server
import os
import shutil
import threading
import time

import pytest

from ablate.base.errors import UserError
from ablate.track.cursor import pending
from ablate.track.mirror import Mirror
from ablate.track.server import choose_port, local_server
from ablate.track.sink import Sink


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "120")


def counts(held):
    return {run_id: {key: len(points) for key, points in run.points.items()} for run_id, run in held.items()}


def whole(study, steps):
    few = {"val_loss": steps // 4, "val_perplexity": steps // 4}
    many = dict.fromkeys(("train_loss", "learning_rate", "grad_norm", "tokens_per_sec"), steps)
    return dict.fromkeys(study.runs.values(), many | few)


@pytest.mark.exhaustive
def test_study_through_a_server(make_study, server, held, summary):
    study = make_study(name="through a server").whole(300)
    folder = study.store.path / "report"
    folder.mkdir()
    (folder / "report.html").write_text("<h1>Verdict</h1>")
    assert Mirror(study.store, server).sync_once().problem is None
    runs = held(study, server)
    assert summary(study, server).artifacts == ["report/report.html"]
    assert counts(runs) == whole(study, 300)
    assert all(run.artifacts == ["config.json", "environment.json"] for run in runs.values())
    assert all(run.info.status == "FINISHED" for run in runs.values())


@pytest.mark.exhaustive
def test_server_is_killed_and_comes_back(study, empty_database, tmp_path, free_port, held, monkeypatch):
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    url = f"http://127.0.0.1:{free_port}"
    mirror = Mirror(study.store, url)
    for arm, seed in study.runs:
        study.start(arm, seed)
        study.train(range(1, 401), arm, seed)
    with local_server(uri, tmp_path / "a", tmp_path / "log", free_port) as (_, process):
        log, logged = Sink.log, []

        def log_and_kill(self, *args, **kwargs):
            log(self, *args, **kwargs)
            logged.append(args)
            if len(logged) == 3:
                os.killpg(process.pid, 9)
                process.wait()

        monkeypatch.setattr(Sink, "log", log_and_kill)
        assert mirror.sync_once().problem is not None
        monkeypatch.setattr(Sink, "log", log)
    report = mirror.sync_once()
    assert "refused" in report.problem
    assert report.unsent
    for arm, seed in study.runs:
        study.train(range(401, 501), arm, seed)
        study.end(arm, seed)
    with local_server(uri, tmp_path / "a", tmp_path / "log", free_port):
        assert mirror.sync_once().problem is None
        assert pending(study.store, url).complete
        assert counts(held(study, url)) == whole(study, 500)


@contextlib.contextmanager
def answering(status, wait_sec=0.0, asked=None):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if asked is not None:
                asked.append(self.path)
            time.sleep(wait_sec)
            with contextlib.suppress(BrokenPipeError):  # the client is impatient
                self.send_response(status)
                self.end_headers()
                self.wfile.write(b"an answer that is no MLflow's")

        do_POST = do_GET  # noqa: N815  the base class's name

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as ill:
        ill.daemon_threads = True
        threading.Thread(target=ill.serve_forever, daemon=True).start()
        yield f"http://ann:s3cret@127.0.0.1:{ill.server_port}"
        ill.shutdown()


@pytest.mark.parametrize("status", [200, 401, 404, 503])
def test_ill_servers(study, status):
    study.whole(4)
    with answering(status) as url:
        report = Mirror(study.store, url).sync_once()
    assert report.problem
    assert "s3cret" not in report.problem
    assert len(report.unsent) == 4


def test_a_server_that_hangs_costs_one_request(study, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    study.whole(4)
    asked = []
    with answering(200, wait_sec=6, asked=asked) as url:
        assert Mirror(study.store, url).sync_once().problem
    assert len(set(asked)) == 1  # asked again as MLflow's client does, and not for each run


def test_ports(server, free_port):
    taken = int(server.rpartition(":")[2])
    with pytest.raises(UserError, match=f"port {taken} is in use"):
        choose_port(taken)
    assert choose_port(free_port) == free_port
    assert choose_port(None) > 0


@pytest.mark.exhaustive
def test_a_server_that_cannot_start(tmp_path, free_port):
    with (
        pytest.raises(UserError, match="ended at once"),
        local_server("nonsense://x", tmp_path, tmp_path / "log", free_port),
    ):
        pass
