"""A study as a job on a real Ray cluster, with its dashboard and token authentication as Ray has them."""

import contextlib
import json
import subprocess
import sys
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from heads import environment_with_token, free_port, ray_head

from ablate.base.errors import UserError
from ablate.cli import cli
from ablate.execute import jobs
from tests.gateway import gateway
from tests.waiting import wait_until

__all__ = ["gateway"]

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


@pytest.fixture(autouse=True)
def no_token_of_ones_own(monkeypatch):
    """Nothing is left in this process that would let Ray ask for a token from now on."""
    monkeypatch.setattr("ablate.execute.cluster.use_token", lambda: None)


@pytest.mark.exhaustive
def test_a_study_runs_as_a_job_and_a_second_submission_does_no_harm(tmp_path):
    (tmp_path / "sent.yaml").write_text(STUDY)
    environment = environment_with_token(tmp_path)
    dashboard = free_port()
    address = f"http://127.0.0.1:{dashboard}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def answers():
        try:
            return opener.open(f"{address}/api/version", timeout=5).close() is None
        except urllib.error.HTTPError:  # it asks for the token
            return True
        except OSError:
            return False

    def submit(*more):
        process = subprocess.run(
            [sys.executable, "-m", "ablate", "submit", "sent.yaml", "--address", address, "--storage",
             str(tmp_path / "shared"), *more],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    with ray_head(environment, free_port(), dashboard):
        wait_until(answers)
        assert "submitted." in submit("--no-follow")
        assert "succeeded" in submit()
        runs = list((tmp_path / "shared" / "sent" / "runs").iterdir())
        assert len(runs) == 2
        for run in runs:
            assert json.loads((run / "status.json").read_text())["state"] == "finished"
            assert [
                path.name for path in sorted((run / "attempts").glob("*.json"))
            ] == ["1.json"]
        # The job has ended: a new one, which finds nothing to do.
        assert "0 to run, 2 of those asked for have ended before" in submit()


class FakeClient:
    """Ray's client for jobs: each job that is submitted runs until it is told to end."""

    def __init__(self):
        self.jobs = {}
        self.submitted = []
        self.starting = 0
        self.refuses = False

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
            raise RuntimeError(
                "Request failed with status code 500: No available agent to submit job"
            )
        self.jobs[job["submission_id"]] = "RUNNING"
        self.submitted.append(job)

    async def tail_job_logs(self, identity):
        yield "one\n"
        self.jobs[identity] = "SUCCEEDED"
        yield "two\n"


@pytest.fixture
def client(monkeypatch):
    made = FakeClient()
    monkeypatch.setattr(jobs, "client_at", lambda _address: made)
    return made


@pytest.fixture
def call(tmp_path):
    """Submit a study; return what was printed."""

    def call(address, *options, storage="/s", text=STUDY):
        (path := tmp_path / "sent.yaml").write_text(text)
        words = [
            "submit",
            str(path),
            "--address",
            address,
            "--storage",
            storage,
            *options,
        ]
        result = CliRunner().invoke(cli, words, catch_exceptions=False)
        assert result.exit_code == 0
        return result.output

    return call


def test_a_second_submission_follows_the_job_and_one_that_has_ended_is_sent_again(
    call, client, monkeypatch
):
    monkeypatch.setattr(jobs, "check_server", lambda *_, **__: None)
    monkeypatch.setattr(jobs.time, "sleep", lambda _seconds: None)
    client.starting = 2
    assert "submitted." in call("x", "--no-follow")
    (job,) = client.submitted
    assert (
        job["entrypoint"]
        == "python -m ablate run study.yaml --address auto --storage /s"
    )
    assert job["submission_id"].startswith("ablate-sent-")
    second = call("x")
    assert "is there already." in second
    assert f"one\ntwo\nJob {job['submission_id']}: succeeded" in second
    assert client.submitted == [job]
    assert "submitted." in call("x")
    call("x", storage="/t")
    call("x", text=STUDY.replace("5.0", "6.0"))
    first, again, *others = (job["submission_id"] for job in client.submitted)
    assert first == again
    assert len({first, *others}) == 3
    client.jobs = {}
    client.refuses = True
    with pytest.raises(UserError, match=r"^x: the job was refused: no such thing$"):
        call("x")


NO_RAY = "what answers there is no Ray dashboard that takes jobs"


@pytest.mark.parametrize(
    ("status", "answer", "said"),
    [
        (200, b"[]", "can run code on it"),
        (401, b"", None),
        (500, b"No available agent", None),
        (200, b"<html>", NO_RAY),
        (200, b"{}", NO_RAY),
        (404, b"", NO_RAY),
    ],
)
def test_what_answers_is_looked_at_before_rays_client_waits(
    call, client, gateway, status, answer, said
):
    way = gateway()
    way.status = status
    way.content = answer
    for options, refuses in ((), said is not None), (("--insecure",), said == NO_RAY):
        with (
            pytest.raises(UserError, match=said)
            if refuses
            else contextlib.nullcontext()
        ):
            call(f"{way.url}/", "--no-follow", *options)


def test_a_server_that_does_not_answer_is_one_line(call, gateway, monkeypatch):
    monkeypatch.setattr(jobs, "_ANSWER_SEC", 0.1)
    way = gateway()
    way.wait_sec = 1.0
    with pytest.raises(
        UserError, match=f"^cannot reach Ray's dashboard at {way.url}: .*timed out"
    ):
        call(way.url)


def test_a_server_that_refuses_rays_client_is_one_line(call, gateway):
    way = gateway()
    way.status = 403
    way.content = b"Invalid Host header"
    fault = f"^cannot reach Ray's dashboard at {way.url}: Authentication failed: Invalid Host header$"
    with pytest.raises(UserError, match=fault):
        call(way.url)
