"""Ray's head node is killed in the middle of a study: `ablate run` says so, and with a new head goes on."""

import json
import socket
import subprocess
import sys
import time

from heads import environment_with_token, free_port, ray_head

from ablate.execute import head as watching
from ablate.execute.head import Head

STUDY = """\
name: small
baseline: bf16
target: {val_loss: 3.5}
seeds: 1
base:
  resources: {checkpoint_every_sec: 0}
  model: {width: 64, layers: 1, heads: 2, ffn: 96}
  data: {source: stdlib, tokenizer: bytes, max_bytes: 300_000}
  training: {tokens: 131_072, seq_len: 64, batch_size: 16, eval_every_tokens: 8192, eval_tokens: 4096}
arms:
  bf16:
  all three: {recipe: {gemms: [fprop, dgrad, wgrad], stabiliser: sr+rht}}
"""


def test_gone_is_what_has_answered_before_and_not_for_long(monkeypatch):
    monkeypatch.setattr(watching, "_LOOK_EVERY_SEC", 0.0)
    port = free_port()
    head = Head(f"127.0.0.1:{port}", gone_after_sec=0.2)
    time.sleep(0.3)
    assert not head.is_gone()  # it never answered
    with socket.create_server(("127.0.0.1", port)):
        assert not head.is_gone()
    assert not head.is_gone()  # not for long enough
    time.sleep(0.3)
    assert head.is_gone()
    with socket.create_server(("127.0.0.1", port)):
        assert not head.is_gone()


def rows(folder):
    """Map every run's id to what it measured, without the times."""
    found = {}
    for path in sorted(folder.glob("runs/small/runs/*/metrics.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[path.parent.name] = [
            {key: value for key, value in row.items() if key not in ("time_unix", "tokens_per_sec")}
            for row in lines
        ]
    return found


def test_a_killed_head(tmp_path):
    (tmp_path / "small.yaml").write_text(STUDY)
    environment = environment_with_token(tmp_path) | {"ABLATE_STORAGE": "runs"}
    port = free_port()
    command = [sys.executable, "-m", "ablate", "run", "small.yaml", "--tracking-uri", "sqlite:///mlflow.db"]
    here = {"cwd": tmp_path, "env": environment, "text": True}

    def on_cluster():
        give_up = time.monotonic() + 90
        while True:
            process = subprocess.Popen(
                [*command, "--address", f"127.0.0.1:{port}"], stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, **here,
            )  # fmt: skip
            while process.poll() is None and not list(tmp_path.glob("runs/small/runs/*/checkpoints/*.json")):
                time.sleep(0.05)
            if process.poll() != 2 or time.monotonic() > give_up:
                return process
            time.sleep(1)  # the head is not up yet

    with ray_head(environment, port) as kill:
        process = on_cluster()
        kill()
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert "does not answer any more" in output
    assert "go on with: ablate run small.yaml" in output
    with ray_head(environment, port):
        process = on_cluster()
        output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    ledgers = [json.loads(path.read_text()) for path in tmp_path.glob("runs/small/runs/*/attempts/*.json")]
    assert sum(record["outcome"] == "finished" for record in ledgers) == 2
    assert any(record["resumed_from_step"] for record in ledgers)

    resumed = rows(tmp_path)
    (tmp_path / "runs").rename(tmp_path / "first")
    undisturbed = subprocess.run(command, check=False, capture_output=True, **here)
    assert undisturbed.returncode == 0, undisturbed.stdout + undisturbed.stderr
    assert resumed == rows(tmp_path)
