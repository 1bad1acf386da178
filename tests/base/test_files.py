import os
from pathlib import Path

import pytest

from ablate.base import files
from ablate.base.errors import UserError
from ablate.base.files import (
    cache_folder,
    open_private,
    open_unlinked,
    refuse_open_folder,
)


def test_the_place_of_the_cache(monkeypatch):
    monkeypatch.setenv("ABLATE_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder("hashes") == Path("/a/hashes")
    monkeypatch.delenv("ABLATE_CACHE")
    assert cache_folder("hashes") == Path("/x/ablate/hashes")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert cache_folder("hashes") == Path("/h/.cache/ablate/hashes")


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o2770, 0o2775])
def test_a_folder_of_ones_own_or_of_a_group_that_shares_it(tmp_path, monkeypatch, mode):
    monkeypatch.setattr(files, "_is_private_group", lambda _: False)
    folder = tmp_path / "folder"
    refuse_open_folder(folder)  # it is not there yet
    folder.mkdir()
    folder.chmod(mode)
    (tmp_path / "disk").symlink_to(folder)
    (folder / "inside").symlink_to("file")
    for path in (folder, tmp_path / "disk"):
        refuse_open_folder(path, with_links=False)


@pytest.mark.parametrize("mode", [0o757, 0o1777, 0o2777, 0o770])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path, monkeypatch, mode):
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.setattr(files, "_is_private_group", lambda _: True)
    if mode == 0o770:  # the group of one's own, as many systems have it
        refuse_open_folder(folder)
        monkeypatch.setattr(files, "_is_private_group", lambda _: False)
    with pytest.raises(
        UserError, match=f"others can write to {folder} .chmod 700 {folder}, or"
    ):
        refuse_open_folder(folder)
    if mode != 0o770:
        folder.chmod(mode & 0o777)
        with pytest.raises(
            UserError, match=f"others can replace what is in {folder} .choose another"
        ):
            refuse_open_folder(folder / "runs" / "small")


def test_a_folder_of_another_user_is_refused_unless_a_file_server_shows_him(
    tmp_path, monkeypatch
):
    owner = os.geteuid()
    if owner == 0:
        owner = 65534
        os.chown(tmp_path, owner, owner)
    else:
        monkeypatch.setattr(files.os, "geteuid", lambda: owner + 1)
    monkeypatch.setattr(files, "_owner_of_new_files", lambda _: owner + 2)
    with pytest.raises(UserError, match=f"{tmp_path} belongs to another user"):
        refuse_open_folder(tmp_path)
    monkeypatch.setattr(files, "_owner_of_new_files", lambda _: owner)
    refuse_open_folder(tmp_path)


def test_a_link_that_leads_out_is_refused_and_no_link_is_written_through(tmp_path):
    inside = tmp_path / "study"
    secret = tmp_path / "secret"
    (inside / "runs").mkdir(parents=True)
    secret.write_text("secret")
    (inside / "runs" / "log").symlink_to(secret)
    with pytest.raises(
        UserError, match=r"runs/log is a link that leads out of .*study .remove it"
    ):
        refuse_open_folder(inside, with_links=False)
    for mode in ("a", "ab", "w"):
        with pytest.raises(OSError, match="symbolic links"):
            open_unlinked(inside / "runs" / "log", mode)
    assert secret.read_text() == "secret"
    with open_private(tmp_path / "logs" / "log", "w") as file:
        file.write("text")
    modes = [
        path.stat().st_mode & 0o777
        for path in (tmp_path / "logs", tmp_path / "logs" / "log")
    ]
    assert modes == [0o700, 0o600]
