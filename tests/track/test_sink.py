import contextlib
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ablate.track.sink import is_local, make_database

MOUNTS = {"/": "ext4", "/home": "nfs4", "/home/ann/my disk": "tmpfs", "/scratch": "lustre"}


@pytest.mark.parametrize(
    ("folder", "local"),
    [("/data", True), ("/home/ann", False), ("/home/ann/my disk/x", True), ("/scratch/x", False)],
)
def test_is_local(folder, local, monkeypatch):
    disks = [SimpleNamespace(mountpoint=point, fstype=kind) for point, kind in MOUNTS.items()]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: disks)
    assert is_local(Path(folder)) is local
    disks.clear()
    assert is_local(Path(folder)) is False


def test_database_is_whole_and_made_once(tmp_path):
    path = tmp_path / "a b" / "mlflow.db"
    make_database(path, tmp_path / "artifacts")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE a_users_own (x)")
    make_database(path, tmp_path / "artifacts")  # as another process would that was a little later
    assert [file.name for file in path.parent.iterdir()] == ["mlflow.db"]
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("SELECT x FROM a_users_own")
        [[mode]] = connection.execute("PRAGMA journal_mode")
        [[place]] = connection.execute("SELECT artifact_location FROM experiments")
    assert mode == ("wal" if is_local(tmp_path) else "delete")
    assert place.startswith((tmp_path / "artifacts").as_uri())
