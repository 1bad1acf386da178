import sys
from pathlib import Path

import pytest

# pytest imports test modules one by one (importlib mode): their helpers have to be found.
sys.path.insert(0, str(Path(__file__).parent))

from four_runs import requests_of


@pytest.fixture
def study(tmp_path):
    """A store with a plan of one arm and four seeds, and the requests to run them."""
    return requests_of(tmp_path / "study")
