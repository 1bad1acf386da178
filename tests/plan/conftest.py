import hashlib

import pytest

from ablate.data import DataIdentity
from ablate.plan import build_plan
from ablate.study import load_study
from tests.golden import settings_of

MODEL = """\
from torch import nn

class Net(nn.Module):
    def __init__(self, vocab_size, width):
        super().__init__()
        self.table = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, vocab_size)

def build(*, vocab_size, seq_len, width=64):
    return Net(vocab_size, width)
"""
HIDDEN = MODEL.replace(
    "(nn.Linear(width, width) for", "(nn.TransformerEncoderLayer(width, 2, 128) for"
)


def identify(data):
    """Stand in for the corpus: its content is the file names without their folders."""
    names = [
        path.rsplit("/", 1)[-1] for path in [*data.paths, "", *data.validation_paths]
    ]
    digest = hashlib.sha256(repr(names).encode()).hexdigest()
    return DataIdentity(digest=digest, vocab_size=256, num_bytes=1)


@pytest.fixture
def study(tmp_path):
    """Write a study file's text and load it; beside it lie a model, one with a hidden part, and a trainer."""
    (tmp_path / "my_model.py").write_text(MODEL)
    (tmp_path / "hidden.py").write_text(HIDDEN)
    (tmp_path / "t.py").write_text("def run(*args, **options):\n    pass\n")

    def load(text, name="study.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return load_study(path, settings_of(text))

    return load


@pytest.fixture
def plan(study):
    """Write a study file's text and plan it, on a stand-in for its data."""

    def make(text, name="study.yaml"):
        return build_plan(study(text, name), identify)

    return make
