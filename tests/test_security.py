"""What a run opens to others: no port beyond loopback, no file that others can write, no secret anywhere."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

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


def watch(process, until, open_to, sessions):
    """Collect where a process and its children listen, and the folders of Ray's sessions."""
    while not until():
        for one in family(process):
            # Most of them come and go: one that has ended between two questions listens to nobody.
            with contextlib.suppress(psutil.Error):
                sessions |= set(re.findall(r"/tmp/ray/session_[\w-]+", " ".join(one.cmdline())))
                for connection in one.net_connections("inet"):
                    if connection.status == psutil.CONN_LISTEN:
                        open_to.add((connection.laddr.ip, one.name()))
        time.sleep(0.3)


def family(process):
    with contextlib.suppress(psutil.Error):
        return [process, *process.children(recursive=True)]
    return []


@pytest.mark.exhaustive
def test_a_run_opens_nothing_to_others(tmp_path):
    (tmp_path / "small.yaml").write_text(STUDY)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = probe.getsockname()[1]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment |= {"ABLATE_STORAGE": "runs", "MLFLOW_TRACKING_URI": f"http://ann:s3cret@127.0.0.1:{nobody}"}
    process = subprocess.Popen(
        [sys.executable, "-m", "ablate", "run", "small.yaml"], cwd=tmp_path, env=environment, umask=0,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    open_to, sessions = set(), set()
    watch(psutil.Process(process.pid), lambda: process.poll() is not None, open_to, sessions)
    output = process.stdout.read()
    assert process.returncode == 0, output
    assert "not up to date" in output  # MLflow was not there; the rest was done

    assert len(open_to) > 3, "Ray's own servers were not seen"
    strange = {each for each in open_to if not each[0].removeprefix("::ffff:").startswith(("127.", "::1"))}
    assert strange == set()

    [session] = sessions
    files = [path for folder in (tmp_path, Path(session)) for path in folder.rglob("*") if path.is_file()]
    written = [path for path in files if path.is_relative_to(tmp_path / "runs")]
    assert len(written) > 20
    assert [path for path in written if path.stat().st_mode & 0o002] == []
    folders = [path for path in (tmp_path / "runs").rglob("*") if path.is_dir()]
    assert [path for path in folders if path.stat().st_mode & 0o002] == []
    assert "s3cret" not in output
    assert [path for path in files if b"s3cret" in path.read_bytes()] == []
