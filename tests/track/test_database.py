import contextlib
import sqlite3
from pathlib import Path

import pytest

from ablate.track.database import is_local, make_database

MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
server:/export /home nfs4 rw 0 0
tmpfs /home/ann/my\\040disk tmpfs rw 0 0
scratch /scratch lustre rw 0 0
"""


@pytest.mark.parametrize(
    ("folder", "local"),
    [("/data", True), ("/home/ann", False), ("/home/ann/my disk/x", True), ("/scratch/x", False)],
)
def test_is_local(folder, local):
    assert is_local(Path(folder), MOUNTS) is local
    assert is_local(Path(folder), "") is False


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
    local = is_local(tmp_path, Path("/proc/self/mounts").read_text())
    assert mode == ("wal" if local else "delete")
    assert place.startswith((tmp_path / "artifacts").as_uri())
