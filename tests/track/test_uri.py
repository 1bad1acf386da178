import pytest

from ablate.base.command_hints import redact
from ablate.base.errors import UserError
from ablate.store import StudyStore
from ablate.track.cursor import cursor_path
from ablate.track.uri import default_tracking_uri, resolve_tracking_uri, sqlite_path


def test_option_before_environment_before_default(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert resolve_tracking_uri(tmp_path) == default_tracking_uri(tmp_path)
    assert sqlite_path(default_tracking_uri(tmp_path)) == tmp_path / "mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://from-environment:5000")
    assert resolve_tracking_uri(tmp_path) == "http://from-environment:5000"
    assert resolve_tracking_uri(tmp_path, "http://option:5000") == "http://option:5000"


def test_relative_sqlite_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_tracking_uri(tmp_path, "sqlite:///my.db") == f"sqlite:///{tmp_path}/my.db"


@pytest.mark.parametrize("uri", ["./mlruns", "file:///tmp/mlruns", "mlruns"])
def test_plain_files_are_refused(tmp_path, uri):
    with pytest.raises(UserError, match="keeps no runs in plain files"):
        resolve_tracking_uri(tmp_path, uri)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GET https://ann:s3cret@host:5000/api failed", "GET https://***@host:5000/api failed"),
        ("https://ann:p@ss@host/x", "https://***@host/x"),
        ("https://token@host", "https://***@host"),
        ("postgresql+psycopg2://ann:pw@host/db", "postgresql+psycopg2://***@host/db"),
        (
            "postgresql://host/db?user=ann&password=s3cret&x=1",
            "postgresql://host/db?user=ann&password=***&x=1",
        ),
        ("sqlite:////home/ann@lab/mlflow.db", "sqlite:////home/ann@lab/mlflow.db"),
        ("http://host/mail@x", "http://host/mail@x"),
    ],
)
def test_redact(text, shown):
    assert redact(text) == shown


def test_the_cursors_name_outlives_a_password(tmp_path):
    old, new, other = (
        cursor_path(StudyStore(tmp_path), f"http://{place}")
        for place in ("a:old@host", "a:new@host", "other")
    )
    assert old == new != other
