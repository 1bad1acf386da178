import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import optuna
import pytest

from ablate.search.ledger import open_storage
from ablate.study import load_study

# pytest imports test modules one by one (importlib mode): their helpers have to be found.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(params=["journal", "sqlite", "grpc"])
def opens(request, tmp_path):
    """Open the same storage again and again, as the same command does after an interruption."""
    if request.param == "journal":
        yield lambda: open_storage(None, tmp_path)
    elif request.param == "sqlite":
        yield lambda: open_storage(f"sqlite:///{tmp_path / 'optuna.db'}", tmp_path)
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        behind = open_storage(None, tmp_path)
        pool = ThreadPoolExecutor()
        server = optuna.storages._grpc.server.make_server(behind, "127.0.0.1", port, pool)
        server.start()
        yield lambda: open_storage(f"grpc://127.0.0.1:{port}", tmp_path)
        server.stop(grace=None)


@pytest.fixture
def study(tmp_path):
    """Write a study file's text and load it."""

    def load(text, name="study.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return load_study(path)

    return load
