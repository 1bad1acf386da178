import hashlib
from pathlib import Path

import pytest

from ablate.base.errors import UserError
from ablate.base.user_functions import code_digest, load_function
from tests.golden import check_answers

SOURCE = """\
from os.path import join as joined

def build(**options):
    return options

alias = build
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_model.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize("name", ["build", "alias", "joined"])
def test_a_function_of_a_file(file, name):
    assert code_digest(f"{file}:{name}") == hashlib.sha256(SOURCE.encode()).hexdigest()
    assert callable(load_function(f"{file}:{name}"))


def test_a_function_of_a_module(file, monkeypatch):
    monkeypatch.syspath_prepend(file.parent)
    assert code_digest("my_model:build") == code_digest(f"{file}:build")
    assert load_function("my_model:build")(a=1) == {"a": 1}
    assert callable(load_function("ablate.train:train"))


def test_looking_for_a_function_runs_nothing(tmp_path):
    path = tmp_path / "loud.py"
    path.write_text("raise SystemExit(3)\n\ndef build():\n    pass\n")
    assert code_digest(f"{path}:build")


def test_what_cannot_be_found_is_one_line(file):
    (file.parent / "broken.py").write_text("def build():\nreturn\n")

    def fault(line):
        with pytest.raises(UserError) as caught:
            code_digest(line.replace("FOLDER", str(file.parent)))
        yield str(caught.value).replace(str(file.parent), "FOLDER")

    check_answers(Path(__file__).with_name("references.txt"), fault)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "import nothing_of_this_name\ndef build(): pass\n",
            "cannot be imported: ModuleNotFoundError",
        ),
        ("build = 3\n", "no function 'build' there"),
    ],
)
def test_what_cannot_be_imported_is_one_line(tmp_path, source, said):
    path = tmp_path / "m.py"
    path.write_text(source)
    with pytest.raises(UserError, match=said) as caught:
        load_function(f"{path}:build")
    assert "\n" not in str(caught.value)
