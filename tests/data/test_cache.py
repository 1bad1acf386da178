import pytest

from ablate.data.cache import find, keep, key_of, record_of, remove_unfinished


@pytest.fixture
def path(tmp_path):
    assert keep(tmp_path / "a.tokens", lambda file: {"count": file.write(b"0123456789")})["count"] == 10
    return tmp_path / "a.tokens"


def test_what_was_kept_is_found_with_its_record(path):
    assert path.read_bytes() == b"0123456789"
    assert find(path) == {"count": 10, "bytes": 10, "sha256": record_of(path)["sha256"]}


@pytest.mark.parametrize("content", [b"012345678", b"0123456780", b"0123456789!", b""])
def test_what_was_cut_short_or_changed_is_not_found(path, content):
    path.write_bytes(content)
    assert find(path) is None


def test_what_has_no_sound_record_is_not_found(path):
    record = path.with_name("a.tokens.json")
    for text in ("", "{", "[1]", '{"bytes": 10}'):
        record.write_text(text)
        assert find(path) is record_of(path) is None
    record.unlink()
    assert find(path) is None


def test_a_record_outlives_its_file(path):
    path.unlink()
    assert find(path) is None
    assert record_of(path)["count"] == 10


def test_a_failure_leaves_nothing_and_a_kill_what_can_be_removed(tmp_path):
    def fail(file):
        file.write(b"012")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        keep(tmp_path / "b.tokens", fail)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "b.tokens.writing.1234").write_bytes(b"012")
    (tmp_path / "c.tokens").write_bytes(b"012")
    remove_unfinished(tmp_path)
    assert [left.name for left in tmp_path.iterdir()] == ["c.tokens"]


def test_a_key_depends_on_the_content_alone():
    assert key_of({"a": 1, "b": [2]}) == key_of({"b": [2], "a": 1}) != key_of({"a": 1, "b": [3]})
