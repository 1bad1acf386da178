"""A head node of Ray that is gone is said, and with a new one a study goes on. Ray's token is a secret."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from heads import environment_with_token, free_port, ray_head

from ablate.base.errors import UserError
from ablate.execute import cluster
from ablate.execute.cluster import Head
from tests.waiting import start_ablate, wait_until

STUDY = """\
name: small
baseline: bf16
target: {val_loss: 3.5}
seeds: 1
base:
  resources: {checkpoint_every_sec: 0}
  model: {width: 64, layers: 1, heads: 2, ffn: 96}
  data: {source: stdlib, tokenizer: bytes, max_bytes: 300_000}
  training: {tokens: 65_536, seq_len: 64, batch_size: 16, eval_every_tokens: 8192, eval_tokens: 4096}
arms:
  bf16:
  all three: {recipe: {gemms: [fprop, dgrad, wgrad], stabiliser: sr+rht}}
"""


def test_gone_is_what_has_answered_before_and_not_for_long(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(cluster, "running_clock", lambda: lambda: clock[0])
    port = free_port()
    head = Head(f"127.0.0.1:{port}")

    def is_gone_after(seconds):
        clock[0] += seconds
        return head.is_gone()

    long = 2 * cluster.GONE_AFTER_SEC
    assert not is_gone_after(long)  # it never answered
    with socket.create_server(("127.0.0.1", port)):
        assert not is_gone_after(long)
    assert not is_gone_after(cluster.GONE_AFTER_SEC / 2)  # not for long enough
    assert is_gone_after(long)
    with socket.create_server(("127.0.0.1", port)):
        assert not is_gone_after(long)


SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
SLOW = "The current node timed out during startup. This could happen because"


@pytest.mark.parametrize(
    ("address", "message", "starts"),
    [(None, SLOW, 2), (None, "no memory", 1), ("127.0.0.1:1", SLOW, 1)],
)
def test_a_local_ray_that_starts_too_slowly_is_ended_and_started_once_more(
    monkeypatch, tmp_path, address, message, starts
):
    begun = []
    others = []
    # the connection sets variables of Ray's
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(cluster, "_private_folder", lambda: tmp_path)

    def init(**_):
        begun.append(
            subprocess.Popen([*SLEEP, str(Path(ray.__file__).parent / "raylet")])
        )
        others.append(subprocess.Popen(SLEEP))
        raise RuntimeError(message)

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    try:
        with (
            pytest.raises(UserError, match="cannot start or reach Ray"),
            cluster.connection(address),
        ):
            pass
        assert len(begun) == starts
        for half_started in begun[:-1]:
            half_started.wait()
        assert begun[-1].poll() is None  # Ray's own exit ends it
        assert all(process.poll() is None for process in others)
    finally:
        for process in begun + others:
            process.kill()
            process.wait()


@pytest.mark.exhaustive
def test_a_killed_head(tmp_path):
    (tmp_path / "small.yaml").write_text(STUDY)
    environment = environment_with_token(tmp_path)
    port = free_port()
    words = ("run", "small.yaml", "--address", f"127.0.0.1:{port}")

    with ray_head(environment, port) as kill:
        process = start_ablate(*words, cwd=tmp_path, env=environment)
        wait_until(
            lambda: list(tmp_path.glob("runs/small/runs/*/checkpoints/*.json")), process
        )
        kill()
        output, _ = process.communicate()
    assert process.returncode == 1, output
    assert "does not answer any more" in output
    assert "go on with: ablate run small.yaml" in output
    with ray_head(environment, port):
        process = start_ablate(*words, cwd=tmp_path, env=environment)
        output, _ = process.communicate()
    assert process.returncode == 0, output
    ledgers = [
        json.loads(path.read_text())
        for path in tmp_path.glob("runs/small/runs/*/attempts/*.json")
    ]
    assert sum(record["outcome"] == "finished" for record in ledgers) == 2
    assert any(record["resumed_from_step"] for record in ledgers)


@pytest.mark.exhaustive
def test_no_folder_of_ray_is_left_by_ctrl_c_at_its_start_or_sigterm_at_the_report(
    tmp_path, short
):
    (tmp_path / "small.yaml").write_text(STUDY)
    for moment, number in (
        (lambda: list(short.glob("ablate-ray-*/r/session_*/logs/*")), signal.SIGINT),
        ((tmp_path / "runs/small/report").exists, signal.SIGTERM),
    ):
        process = start_ablate(
            "run",
            "small.yaml",
            cwd=tmp_path,
            env=os.environ | {"TMPDIR": str(short)},
            stdout=None,
        )
        wait_until(moment, process)
        process.send_signal(number)
        assert process.wait() == (130 if number == signal.SIGINT else -number)
        wait_until(lambda: not list(short.glob("ablate-ray-*")))


PRIVATE = """
import tempfile, sys
from ablate.execute.cluster import _private_folder
tempfile.tempdir = sys.argv[1]
print(_private_folder(), flush=True)
input()
"""


@pytest.mark.parametrize("end", [None, signal.SIGTERM, signal.SIGKILL])
def test_the_folder_of_a_local_ray_is_private_and_goes_with_its_process(short, end):
    process = subprocess.Popen(
        [sys.executable, "-c", PRIVATE, str(short)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    folder = Path(process.stdout.readline().strip())
    assert (folder.stat().st_mode & 0o777, folder.parent) == (0o700, short)
    if end is None:
        process.communicate("\n")
        assert list(short.iterdir()) == []
    else:
        process.send_signal(end)
        process.communicate()
    wait_until(lambda: not list(short.iterdir()))


def test_a_folder_that_others_can_replace_is_refused(monkeypatch, short):
    short.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    with pytest.raises(
        UserError,
        match=f"others can replace what is in {short}: Ray's files would not be",
    ):
        cluster._private_folder.__wrapped__()


@pytest.mark.parametrize(
    ("above", "mode", "warns"),
    [
        (0o755, 0o777, True),
        (0o755, 0o755, False),
        (0o700, 0o777, False),
        (0o710, 0o770, True),
    ],
)
def test_a_cluster_whose_folder_others_can_write_is_warned_of(
    monkeypatch, short, above, mode, warns
):
    warnings = []
    folder = short / "ray"
    folder.mkdir()
    folder.chmod(mode)
    short.chmod(above)
    node = SimpleNamespace(get_temp_dir_path=lambda: str(folder))
    monkeypatch.setattr("ray._private.worker._global_node", node)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", lambda **_: None)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    monkeypatch.setattr(cluster, "use_token", lambda: None)
    with cluster.connection("127.0.0.1:1", warnings.append):
        pass
    assert [str(folder) in sentence for sentence in warnings] == [True] * warns


def test_a_token_that_others_can_read_is_warned_of(tmp_path, monkeypatch):
    path = tmp_path / "token"
    # nothing is left for other tests
    monkeypatch.setattr(os, "environ", {"RAY_AUTH_TOKEN_PATH": str(path)})
    assert cluster.use_token() is None
    assert "RAY_AUTH_MODE" not in os.environ
    path.write_text("secret")
    path.chmod(0o644)
    assert (
        cluster.use_token()
        == f"Others on this machine can read Ray's token: chmod 600 {path}"
    )
    path.chmod(0o600)
    assert cluster.use_token() is None
    assert os.environ["RAY_AUTH_MODE"] == "token"
