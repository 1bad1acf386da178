import os
import shutil
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings

TRAINERS = Path(__file__).parent / "execute"

# Test processes side by side that all compute on all cores get in each other's way: beside another on two
# cores tests/models/test_custom_models.py took 142 s, not 19 s. Before torch is imported; children inherit.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Else Ray's workers give way to every other process: beside busy tests what takes 5 s alone took 86 s.
    os.environ.setdefault("RAY_worker_niceness", "0")
# As the mirror sets it, which is not always the first to import mlflow here.
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")

# An example takes longer on a busy machine, and the first one imports what it needs. A fixture may serve all.
settings.register_profile(
    "any machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("any machine")

# A runner that starts the tests in the background has Ctrl-C ignored, and what the tests start inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Put the tests that share a Ray first: one process runs most of them, and the longest do not come last."""
    items.sort(key=lambda item: "local_ray" not in item.fixturenames)


@pytest.fixture
def short():
    """A folder with a short path, for sockets, and not among pytest's, which are closed to others."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def local_ray():
    """One local Ray for the whole test session; starting one takes seconds."""
    import ray

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    paths = [str(TRAINERS), *filter(None, [os.environ.get("PYTHONPATH")])]
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}},
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A headless Chromium that asks the network for nothing by itself, and logs what its pages ask for."""
    webdriver = pytest.importorskip("selenium.webdriver")
    names = ("chromium", "google-chrome", "chrome", "chromedriver")
    *chromium, driver = (shutil.which(name) for name in names)
    if not (any(chromium) and driver):
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = next(filter(None, chromium))
    options.set_capability(
        "goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"}
    )
    flags = "headless=new no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
    flags += (
        "disable-component-update disable-sync window-size=1440,1200 user-data-dir="
    )
    for flag in f"{flags}{tmp_path_factory.mktemp('chromium')}".split():
        options.add_argument(f"--{flag}")
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    # the browser's own first page goes on loading parts of itself
    driver.get("about:blank")
    # axe on a large page takes half a minute of a busy machine
    driver.set_script_timeout(120)
    yield driver
    driver.quit()


@pytest.fixture
def without_figures(monkeypatch):
    """Write reports without their figures, which take most of the time."""
    monkeypatch.setattr("ablate.reports.pages.write.draw_figures", lambda _: ())


@pytest.fixture(scope="session")
def shared_data():
    """Return the folder of real text and real MLPerf logs, which is not part of the project."""
    folder = Path(
        os.environ.get(
            "ABLATE_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"
        )
    )
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder} (set ABLATE_SHARED_DATA)")
    return folder


@pytest.fixture(scope="session")
def tokens():
    """Learnable text-like tokens: a noisy walk over 64 symbols."""
    import numpy as np

    steps = np.random.default_rng(0).integers(1, 4, 60_000)
    stream = (np.cumsum(steps) % 64).astype(np.uint16)
    return stream[:50_000], stream[50_000:]


@pytest.fixture
def make_config():
    """Make a run's configuration: a small decoder on ``tokens``, with what a test changes.

    A recipe may stand in any form.
    """
    from ablate.recipes import Recipe, RecipeSpec, read_recipe, resolve
    from ablate.run.config import DataConfig, ModelConfig, RunConfig, TrainingConfig

    def make(recipe=None, *, seed=0, model=None, backend="emulated", **training):
        shape = {"width": 64, "layers": 2, "heads": 2, "ffn": 96} | (model or {})
        defaults = {
            "tokens": 16_384, "seq_len": 32, "batch_size": 16, "learning_rate": 3e-3,
            "eval_every_tokens": 4096, "eval_tokens": 2048,
        }  # fmt: skip
        if not isinstance(recipe, Recipe):
            recipe = (
                resolve(recipe)
                if isinstance(recipe, RecipeSpec)
                else read_recipe(recipe or "bf16")
            )
        return RunConfig(
            model=ModelConfig(**shape),
            data=DataConfig(),
            data_digest="test",
            vocab_size=64,
            training=TrainingConfig(**(defaults | training)),
            recipe=recipe,
            backend=backend,
            seed=seed,
        )

    return make


@pytest.fixture
def h200(monkeypatch):
    """Let torch see a GPU that is not there; nothing can be computed on it."""
    import torch

    from ablate.backends.device import device_of
    from ablate.plan import shares

    found = SimpleNamespace(
        name="NVIDIA H200", total_memory=141 * 10**9, major=9, minor=0
    )
    found.multi_processor_count = 132
    monkeypatch.setattr(shares, "_DRIVERS", ("/dev/null",))
    monkeypatch.setattr(shares.os, "cpu_count", lambda: 16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    for looked_up in (shares.this_machine, device_of):
        looked_up.cache_clear()
    yield
    for looked_up in (shares.this_machine, device_of):
        looked_up.cache_clear()
