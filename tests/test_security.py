"""What a run opens to others: no port beyond loopback, no file that others can write, no secret anywhere."""

import contextlib
import ctypes
import http.client
import os
import pwd
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from ablate.base.files import hash_of, record_text
from tests.cli.command import ablate
from tests.execute.heads import free_port
from tests.waiting import run_python, start_ablate

ENVIRONMENT = {
    key: value for key, value in os.environ.items() if not key.startswith("RAY_")
}

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


def watch(process):
    """Collect where a process and its children listen, the metrics there, and Ray's sessions' folders."""
    open_to, sessions, shown = set(), set(), []
    parent = psutil.Process(process.pid)
    while process.poll() is None:
        family = [parent]
        with contextlib.suppress(psutil.Error, OSError):
            family += parent.children(recursive=True)
        for member in family:
            # Most of them come and go: one that has ended between two questions listens to nobody.
            with contextlib.suppress(psutil.Error, OSError):
                command = " ".join(member.cmdline())
                sessions |= set(re.findall(r"/[\w/-]+/session_[\d_-]+", command))
                for connection in member.net_connections("inet"):
                    if connection.status == psutil.CONN_LISTEN:
                        open_to.add((connection.laddr.ip, member.name()))
                        shown.append(metrics_at(connection.laddr.port))
        time.sleep(0.3)
    return open_to, sessions, "".join(shown)


def metrics_at(port):
    with contextlib.suppress(OSError, http.client.HTTPException):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        return (
            opener.open(f"http://127.0.0.1:{port}/metrics", timeout=2).read().decode()
        )
    return ""


@pytest.mark.exhaustive
def test_a_run_opens_nothing_to_others(tmp_path):
    (tmp_path / "small.yaml").write_text(STUDY)
    environment = ENVIRONMENT | {
        "MLFLOW_TRACKING_URI": f"http://ann:s3cret@127.0.0.1:{free_port()}"
    }
    process = start_ablate("run", "small.yaml", cwd=tmp_path, env=environment, umask=0)
    open_to, sessions, shown = watch(process)
    output = process.stdout.read()
    assert process.returncode == 0, output
    assert "not up to date" in output  # MLflow was not there; the rest was done

    assert len(open_to) > 3, "Ray's own servers were not seen"
    for address, name in open_to:
        loopback = address.removeprefix("::ffff:").startswith(("127.", "::1"))
        assert loopback, name

    ids = [path.name for path in (tmp_path / "runs" / "small" / "runs").iterdir()]
    assert len(ids) == 2
    assert [word for word in (*ids, "small", "ablate run") if word in shown] == []

    [session] = sessions
    assert not Path(session).exists()
    written = [path for path in (tmp_path / "runs").rglob("*") if path.exists()]
    assert len(written) > 20
    assert [path for path in written if path.stat().st_mode & 0o002] == []
    assert "s3cret" not in output
    files = (path for path in tmp_path.rglob("*") if path.is_file())
    assert [path for path in files if b"s3cret" in path.read_bytes()] == []


STRANGER = """
import ray
from ray._raylet import GcsClient

# Whoever writes to this table writes the functions that the workers unpickle and call.
print("written", GcsClient(address={address!r}).internal_kv_put(b"planted", b"x", True, None))
"""
OWNER = """
import os
from ablate.execute.cluster import connection

with connection(None):
    import ray
    print(
        ray.get_runtime_context().gcs_address,
        os.environ["RAY_AUTH_TOKEN_PATH"],
        ray._private.worker._global_node.get_session_dir_path(),
        flush=True,
    )
    input()
"""
PLANT = """
import os, pathlib

session = pathlib.Path({session!r})
for attack in (
    lambda: (session / "runtime_resources" / "py_modules_files").mkdir(parents=True),
    lambda: (session / "logs").rename(session / "logs.old"),
    lambda: (session / "sockets" / "mine").symlink_to("/"),
    lambda: session.parent.parent.rename(session.parent.parent.with_name("mine")),
):
    try:
        attack()
    except PermissionError:
        continue
    print("planted")
"""


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """Return a function that runs code with this Ray as another user; skip where that cannot be done."""
    home = tmp_path_factory.mktemp("stranger", numbered=True)
    nobody = pwd.getpwnam("nobody")
    here = str(Path(__file__).parents[1])
    places = os.pathsep.join(
        [here, *(path for path in sys.path if "site-packages" in path)]
    )
    environment = {"PYTHONPATH": places, "HOME": "/", "PATH": "/usr/bin:/bin"}
    environment |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "TMPDIR": str(home)}
    # The interpreter of a virtual environment may lie where others cannot go.
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for python in (
        sys.executable,
        shutil.which(version, path="/usr/bin:/usr/local/bin"),
    ):

        def run(code, python=python, user=nobody.pw_uid, groups=(), **variables):
            return subprocess.run(
                [python, "-c", code], env=environment | variables, cwd="/", capture_output=True, text=True,
                user=user, group=nobody.pw_gid, extra_groups=groups, check=False,
            )  # fmt: skip

        with contextlib.suppress(OSError, TypeError):
            if run("import ray").returncode == 0:
                return run
    pytest.skip(
        "no other user can start a Python with this Ray here (needs root, and folders open to all)"
    )


@pytest.mark.exhaustive
def test_no_other_user_can_run_code_through_a_local_ray(stranger):
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(
        command,
        env=ENVIRONMENT,
        umask=0,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as owner:
        address, token, session = owner.stdout.readline().split()
        code = STRANGER.format(address=address)
        for variables in (
            {},
            {"RAY_AUTH_MODE": "disabled"},
            {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64},
        ):
            refused = stranger(code, **variables)
            assert refused.returncode != 0
            assert "written" not in refused.stdout
        assert "Permission denied" in stranger(f"open({token!r}).read()").stderr
        attacked = stranger(PLANT.format(session=session))
        assert (attacked.returncode, attacked.stdout) == (0, ""), attacked
        # With the token it would be done: the test can fail.
        done = stranger(
            code, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=Path(token).read_text()
        )
        assert done.stdout.startswith("written"), done.stderr
        owner.stdin.write("\n")
        owner.stdin.close()
    assert not Path(token).parent.exists()


PLANTED = """
#include <stdio.h>
__attribute__((constructor)) static void at_load() { fclose(fopen("SEEN", "w")); }
"""
PLANT_KERNEL = """
import shutil
from pathlib import Path

target = Path({target!r})
target.parent.mkdir(exist_ok=True)
shutil.copyfile({library!r}, target)
target.with_suffix(".json").write_bytes({record!r})
"""
LOAD_KERNEL = """
from ablate.backends import cpu_build

print(cpu_build._build_here().target.name)
print(cpu_build.loaded()[1])
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler here")
def test_no_other_user_can_plant_a_kernel(stranger, short):
    cache, seen, library = short / "cache", short / "seen", short / "planted.so"
    short.chmod(0o755)
    cache.mkdir()
    cache.chmod(0o777)
    code = PLANTED.replace("SEEN", str(seen))
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-x", "c", "-", "-o", library],
        input=code,
        text=True,
        check=True,
    )
    environment = os.environ | {"ABLATE_CACHE": str(cache)}

    def load():
        return run_python(LOAD_KERNEL, env=environment).stdout

    target = cache / "kernels" / load().splitlines()[0]
    shutil.rmtree(target.parent, ignore_errors=True)
    record = record_text({"hash_of_kernel": hash_of(library.read_bytes())})
    planted = stranger(
        PLANT_KERNEL.format(target=str(target), library=str(library), record=record)
    )
    assert planted.returncode == 0, planted.stderr
    said = load()
    assert "compiled by" in said
    assert f"({target.parent} belongs to another user)" in said
    assert not seen.exists()
    target.chmod(0o755)
    ctypes.CDLL(str(target))  # the test can fail
    assert seen.exists()


PLANT_LINKS = """
from pathlib import Path
from tests.cli.stored import make_store

study = make_store(Path({storage!r})).path
(study / "report").symlink_to({private!r})
(study / "mirror").mkdir()
(study / "mirror" / "mirror.log").symlink_to({private!r} + "/diary")
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mode", "why"),
    [(0o777, "others can write to"), (0o755, "belongs to another user")],
)
def test_a_storage_in_which_a_stranger_has_put_links_is_refused(
    stranger, short, tmp_path, mode, why
):
    short.chmod(0o777)  # he needs to write there once
    private = tmp_path / "private"
    private.mkdir()
    (private / "diary").write_text("mine")
    planted = stranger(PLANT_LINKS.format(storage=str(short), private=str(private)))
    assert planted.returncode == 0, planted.stderr
    short.chmod(mode)
    for words in (("report",), ("dashboard", "--sync"), ("clean", "--yes")):
        assert why in ablate(*words, "s", cwd=tmp_path, storage=short).line
    assert [(path.name, path.read_text()) for path in private.iterdir()] == [
        ("diary", "mine")
    ]


SHARE = """
import os, sys
from pathlib import Path
from ablate.cli import main
from ablate.store import StudyStore
from ablate.store.leases import Leases
from ablate.store.study_lock import running
from ablate.track.mirror import Mirror
from tests.cli.stored import IDS, make_store

os.umask(0o002)
storage = Path({storage!r})
store = StudyStore(storage / "s")
if not store.path.exists():
    make_store(storage)
with running(store, store.plan()):
    lease = Leases(store.run(IDS[1]).attempts).claim()
    print(lease.record.attempt)
    lease.end("interrupted")
report = Mirror(store, "sqlite:///" + str(storage / "mlflow.db")).sync_once()
assert report.problem is None, report.problem
sys.argv = ["ablate", "report", "s", "--storage", str(storage)]
main()
"""


@pytest.mark.exhaustive
def test_a_group_shares_a_storage(stranger, short):
    """Two users of one group, one after the other; without the setgid bit, or the group, it is refused."""
    group, (first, second) = pwd.getpwnam("nobody").pw_gid + 7, (65531, 65532)
    os.chown(short, 0, group)
    short.chmod(0o2770)
    code = SHARE.format(storage=str(short))
    for attempt, user in enumerate((first, second, first), 1):
        done = stranger(code, user=user, groups=[group])
        assert (done.returncode, done.stdout[:1]) == (0, str(attempt)), done.stderr
    owners = {path.stat().st_uid for path in short.rglob("*")}
    assert owners == {first, second}
    short.chmod(0o770)
    refused = stranger(code, user=second, groups=[group])
    assert "UserError: others can write to" in refused.stderr
