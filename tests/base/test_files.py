from pathlib import Path

from ablate.base.files import cache_folder


def test_the_place_of_the_cache(monkeypatch):
    monkeypatch.setenv("ABLATE_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder("hashes") == Path("/a/hashes")
    monkeypatch.delenv("ABLATE_CACHE")
    assert cache_folder("hashes") == Path("/x/ablate/hashes")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert cache_folder("hashes") == Path("/h/.cache/ablate/hashes")
