"""A study as a job on a real Ray cluster, with its dashboard and token authentication as Ray has them."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from heads import environment_with_token, free_port, ray_head

from ablate.base.errors import UserError
from ablate.cli import cli
from ablate.execute import submit as submitting
from ablate.execute.submit import job_id
from tests.waiting import wait_until

STUDY = """\
name: sent
baseline: bf16
target: {val_loss: 5.0}
seeds: 1
base:
  model: {width: 32, layers: 1, heads: 2, ffn: 64}
  data: {max_bytes: 300_000}
  training: {tokens: 2_048, seq_len: 32, batch_size: 8, eval_every_tokens: 512, eval_tokens: 1_024}
arms:
  bf16:
  fprop: {recipe: {gemms: [fprop]}}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The address of a head node's dashboard; the token lies in a folder of the test."""
    environment, dashboard = environment_with_token(tmp_path_factory.mktemp("home")), free_port()
    address = f"http://127.0.0.1:{dashboard}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def answers():
        try:
            return opener.open(f"{address}/api/version", timeout=5).close() is None
        except urllib.error.HTTPError:  # it asks for the token
            return True
        except OSError:
            return False

    with ray_head(environment, free_port(), dashboard):
        wait_until(answers)
        yield address, environment


@pytest.fixture(autouse=True)
def no_token_of_ones_own(monkeypatch):
    """Nothing is left in this process that would let Ray ask for a token from now on."""
    monkeypatch.setattr("ablate.execute.cluster.use_token", lambda: None)


def submit(cluster, folder, *more):
    address, environment = cluster
    return subprocess.run(
        [sys.executable, "-m", "ablate", "submit", "sent.yaml", "--address", address, "--storage",
         str(folder / "shared"), *more],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.exhaustive
def test_a_study_runs_as_a_job_and_a_second_submission_does_no_harm(cluster, tmp_path):
    (tmp_path / "sent.yaml").write_text(STUDY)
    first = submit(cluster, tmp_path, "--no-follow")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "submitted." in first.stdout
    second = submit(cluster, tmp_path)
    assert "is there already" in second.stdout or "submitted." in second.stdout
    assert second.returncode == 0, second.stdout + second.stderr
    assert "succeeded" in second.stdout
    runs = list((tmp_path / "shared" / "sent" / "runs").iterdir())
    assert len(runs) == 2
    for run in runs:
        assert json.loads((run / "status.json").read_text())["state"] == "finished"
        assert [path.name for path in sorted((run / "attempts").glob("*.json"))] == ["1.json"]
    again = submit(cluster, tmp_path)  # the job has ended: a new one, which finds nothing to do
    assert again.returncode == 0
    assert "0 to run, 2 of those asked for have ended before" in again.stdout


def call(*arguments):
    return CliRunner().invoke(cli, ["submit", *map(str, arguments)], catch_exceptions=False)


class FakeClient:
    """Ray's client for jobs: each job that is submitted runs until it is told to end."""

    def __init__(self):
        self.jobs, self.submitted = {}, []
        self.starting, self.refuses = 0, False

    def list_jobs(self):
        return [SimpleNamespace(submission_id=identity) for identity in self.jobs]

    def get_job_status(self, identity):
        return SimpleNamespace(value=self.jobs[identity])

    def delete_job(self, identity):
        del self.jobs[identity]

    def submit_job(self, **job):
        assert job["submission_id"] not in self.jobs
        if self.refuses:
            raise RuntimeError("no such thing")
        self.starting -= 1
        if self.starting > 0:
            raise RuntimeError("Request failed with status code 500: No available agent to submit job")
        self.jobs[job["submission_id"]] = "RUNNING"
        self.submitted.append(job)

    async def tail_job_logs(self, identity):
        yield "one\n"
        self.jobs[identity] = "SUCCEEDED"
        yield "two\n"


@pytest.fixture
def sent(tmp_path, monkeypatch):
    """The path of a study, a made-up client, and whether the server is looked at."""
    (tmp_path / "sent.yaml").write_text(STUDY)
    client = FakeClient()
    monkeypatch.setattr(submitting, "client_at", lambda _address: client)
    return tmp_path / "sent.yaml", client


def test_a_second_submission_follows_the_job_and_one_that_has_ended_is_sent_again(sent, monkeypatch):
    path, client = sent
    monkeypatch.setattr(submitting, "check_server", lambda *_, **__: None)
    monkeypatch.setattr(submitting.time, "sleep", lambda _seconds: None)
    options = (path, "--address", "x", "--storage", "/shared")
    client.starting = 2
    first = call(*options, "--no-follow")
    assert first.exit_code == 0
    assert "submitted." in first.output
    (job,) = client.submitted
    assert job["entrypoint"] == "python -m ablate run study.yaml --address auto --storage /shared"
    second = call(*options)
    assert "is there already." in second.output
    assert f"one\ntwo\nJob {job['submission_id']}: succeeded" in second.output
    assert client.submitted == [job]
    assert "submitted." in call(*options).output
    assert [one["submission_id"] for one in client.submitted] == [job["submission_id"]] * 2
    client.jobs, client.refuses = {}, True
    with pytest.raises(UserError, match=r"^x: the job was refused: no such thing$"):
        call(*options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--storage", "shared"], "expected an absolute path that all nodes share"),
        (["--storage", "/s", "--tracking-uri", "https://ann:s3cret@host"], "MLFLOW_TRACKING_PASSWORD"),
        (["--storage", "/s"], r"cannot reach Ray's dashboard at http://127\.0\.0\.1:1"),
    ],
)
def test_what_cannot_be_submitted_is_one_line(sent, options, said):
    with pytest.raises(UserError, match=said) as caught:
        call(sent[0], "--address", "http://127.0.0.1:1", *options)
    assert "s3cret" not in str(caught.value)


@contextlib.contextmanager
def server(status, answer):
    """The address of a server that answers so."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as head:
        threading.Thread(target=head.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{head.server_port}/"
        head.shutdown()


@pytest.mark.parametrize(
    ("status", "answer", "said"),
    [
        (200, b"[]", "can run code on it"),
        (401, b"", None),
        (500, b"No available agent", None),
        (200, b"<html>", "what answers there is no Ray dashboard that takes jobs"),
        (200, b"{}", "what answers there is no Ray dashboard that takes jobs"),
        (404, b"", "what answers there is no Ray dashboard that takes jobs"),
    ],
)
def test_what_answers_is_looked_at_before_rays_client_waits(sent, status, answer, said):
    with server(status, answer) as address:
        options = (sent[0], "--address", address, "--storage", "/s", "--no-follow")
        with pytest.raises(UserError, match=said) if said else contextlib.nullcontext():
            assert call(*options).exit_code == 0
        takes_it = said is None or "code" in said
        with contextlib.nullcontext() if takes_it else pytest.raises(UserError, match=said):
            assert call(*options, "--insecure").exit_code == 0


def test_a_port_where_another_program_listens_is_told_at_once(sent, monkeypatch):
    options = (sent[0], "--storage", "/s", "--insecure", "--address")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(submitting, "_ANSWER_SEC", 0.1)
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UserError, match=f"^cannot reach Ray's dashboard at {address}: .*timed out"):
            call(*options, address)
        silent.accept()[0].close()
        greet = threading.Thread(target=lambda: silent.accept()[0].sendall(b"SSH-2.0-OpenSSH\r\n"))
        greet.start()
        monkeypatch.setattr(submitting, "_ANSWER_SEC", 5)
        with pytest.raises(UserError, match=f"^{address}: what answers there is no Ray dashboard"):
            call(*options, address)
        greet.join()
    with pytest.raises(UserError, match=r"^--address: head:8265 is no dashboard's address \(expected the"):
        call(*options, "head:8265")


def test_a_server_that_refuses_rays_client_is_one_line(tmp_path):
    (tmp_path / "sent.yaml").write_text(STUDY)
    with server(403, b"Invalid Host header") as address:
        said = f"^cannot reach Ray's dashboard at {address}: Authentication failed: Invalid Host header$"
        with pytest.raises(UserError, match=said):
            call(tmp_path / "sent.yaml", "--storage", "/s", "--address", address)


def test_the_id_is_that_of_what_is_run():
    one = job_id("My study", b"x", "/s")
    assert one.startswith("ablate-my-study-")
    assert one == job_id("My study", b"x", "/s")
    assert len({one, job_id("My study", b"y", "/s"), job_id("My study", b"x", "/t")}) == 3
    assert job_id("…", b"", "").startswith("ablate-study-")
