import os
import signal
from pathlib import Path

import pytest

TRAINERS = Path(__file__).parent / "execute"

# Test processes side by side that all compute on all cores get in each other's way: beside another on two
# cores tests/models/test_foreign.py took 142 s, not 19 s. Before torch is imported; children inherit it.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A runner that starts the tests in the background has Ctrl-C ignored, and what the tests start inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def local_ray(tmp_path_factory):
    """One local Ray for the whole test session; starting one takes seconds."""
    import ray

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": {"PYTHONPATH": str(TRAINERS)}},
    )
    yield
    ray.shutdown()
