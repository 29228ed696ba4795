"""Files and folders that appear under their name only when they are complete."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from secure_loader.core import atomic
from secure_loader.core.atomic import atomic_file, pwrite_all, write_bytes
from secure_loader.core.staging import staged_folder
from secure_loader.errors import ConfigError, MissingFileError, ReadError, WriteError

PRINT = {"what": "test"}


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_a_file_appears_when_it_is_complete(tmp_path):
    path = tmp_path / "a"
    with atomic_file(path) as fd:
        pwrite_all(fd, memoryview(b"hello"), 0)
        assert not path.exists()
        (temporary,) = tmp_path.iterdir()
        assert temporary.name.startswith(".a.tmp-")
        assert temporary.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes() == b"hello"
    assert names(tmp_path) == ["a"]


def test_permissions_follow_the_umask_or_the_caller(tmp_path):
    old = os.umask(0o027)
    try:
        write_bytes(tmp_path / "a", b"")
    finally:
        os.umask(old)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640
    write_bytes(tmp_path / "b", b"", mode=0o600)
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x"), ReadError("x")])
def test_nothing_is_left_of_a_file_that_failed(tmp_path, error):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(type(error)), atomic_file(path):
        raise error
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("number", "hint"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EFBIG, True), (errno.EIO, False)]
)
def test_failed_writes_are_typed(tmp_path, monkeypatch, number, hint):
    def fails(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(atomic.os, "pwrite", fails)
    with pytest.raises(WriteError, match=os.strerror(number)) as caught:
        write_bytes(tmp_path / "a", b"hello")
    assert (caught.value.hint is not None) == hint
    assert names(tmp_path) == []


def test_an_error_when_syncing_is_an_error(tmp_path, monkeypatch):
    def fails(fd):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(atomic.os, "fsync", fails)
    with pytest.raises(WriteError, match="Input/output error"):
        write_bytes(tmp_path / "a", b"hello")
    assert names(tmp_path) == []


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(atomic.os, "pwrite", lambda fd, data, at: real(fd, data[:3], at))
    write_bytes(tmp_path / "a", b"hello world")
    assert (tmp_path / "a").read_bytes() == b"hello world"


def test_without_overwriting(tmp_path):
    write_bytes(tmp_path / "a", b"1", overwrite=False)
    with pytest.raises(WriteError, match="exists already"):
        write_bytes(tmp_path / "a", b"2", overwrite=False)
    assert (tmp_path / "a").read_bytes() == b"1"
    assert names(tmp_path) == ["a"]


def test_a_folder_appears_when_it_is_complete(tmp_path):
    target = tmp_path / "out"
    with staged_folder(target, fingerprint=PRINT) as staging:
        (staging.folder / "a").write_text("1")
        assert not target.exists()
    assert names(target) == ["a"]
    assert names(tmp_path) == ["out"]


def test_a_second_run_at_the_same_time(tmp_path):
    with staged_folder(tmp_path / "out", fingerprint=PRINT) as staging:
        (staging.folder / "a").write_text("1")
        with (
            pytest.raises(WriteError, match="another run is writing this folder"),
            staged_folder(tmp_path / "out", fingerprint=PRINT),
        ):
            pass
        assert (staging.folder / "a").exists(), "the second run took nothing away"


def test_resuming_needs_the_same_fingerprint(tmp_path):
    target = tmp_path / "out"

    def run(fingerprint):
        with pytest.raises(KeyboardInterrupt), staged_folder(target, fingerprint=fingerprint) as staging:  # noqa: PT012 - the run
            seen = staging.resumed, sorted(p.name for p in staging.folder.iterdir() if not p.name.startswith("."))
            staging.remember({"n": 1})
            (staging.folder / "a").write_text("1")
            (staging.folder / "sub").mkdir(exist_ok=True)
            raise KeyboardInterrupt
        return seen

    assert run(PRINT) == (None, [])
    assert run(PRINT) == ({"n": 1}, ["a", "sub"])
    assert run({"what": "else"}) == (None, [])
    assert not target.exists()
    state = tmp_path / ".out.partial" / ".secure_loader_state.json"
    state.write_text(state.read_text()[:-5])
    assert run({"what": "else"}) == (None, []), "a damaged state means to start over"


@pytest.mark.parametrize("what", ["link", "dangling", "file"])
def test_a_trap_in_place_of_the_hidden_folder(tmp_path, what):
    """Who may write the parent folder could otherwise have us clear away any folder of the user."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis").write_text("years of work")
    trap = tmp_path / ".out.partial"
    if what == "file":
        trap.write_text("")
    else:
        trap.symlink_to(precious if what == "link" else tmp_path / "nowhere")
    with pytest.raises(WriteError), staged_folder(tmp_path / "out", fingerprint=PRINT):
        pass
    assert names(precious) == ["thesis"]


@pytest.mark.parametrize("force", [False, True])
def test_what_is_at_the_destination(tmp_path, force):
    def attempt(target):
        with staged_folder(target, fingerprint=PRINT, force=force) as staging:
            (staging.folder / "new").write_text("1")

    (tmp_path / "empty").mkdir()
    attempt(tmp_path / "empty")
    assert names(tmp_path / "empty") == ["new"]
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="exists and is not a folder"):
        attempt(tmp_path / "file")
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    with pytest.raises(WriteError, match="exists and is not a folder"):
        attempt(tmp_path / "link")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("")
    with pytest.raises(WriteError, match="is not a model folder" if force else "is not empty"):
        attempt(tmp_path / "photos")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    if force:
        attempt(tmp_path / "model")
        assert names(tmp_path / "model") == ["new"]
    else:
        with pytest.raises(WriteError, match="is not empty"):
            attempt(tmp_path / "model")
        assert names(tmp_path / "model") == ["config.json"]
    assert not [n for n in names(tmp_path) if ".old-" in n or ".partial" in n]
    with pytest.raises(ConfigError):
        attempt(tmp_path.__class__("/"))


def test_the_old_folder_stays_until_the_new_one_is_complete(tmp_path, monkeypatch):
    target = tmp_path / "model"
    target.mkdir()
    (target / "config.json").write_text("old")
    with pytest.raises(ZeroDivisionError), staged_folder(target, fingerprint=PRINT, force=True) as staging:  # noqa: PT012 - the run
        (staging.folder / "config.json").write_text("new")
        raise ZeroDivisionError
    assert (target / "config.json").read_text() == "old"
    real = os.rename

    def fails(a, b):
        if Path(a).name == ".model.partial":
            raise OSError(errno.EIO, "Input/output error")
        real(a, b)

    monkeypatch.setattr("secure_loader.core.staging.os.rename", fails)
    with pytest.raises(WriteError, match="Input/output error"), staged_folder(target, fingerprint=PRINT, force=True):
        pass
    assert (target / "config.json").read_text() == "old"


def test_a_missing_source_is_not_called_a_failed_write(tmp_path):
    """MissingFileError is an OSError as well."""
    with pytest.raises(MissingFileError, match="source"), staged_folder(tmp_path / "out", fingerprint=PRINT):
        raise MissingFileError("no such file", path="source")
    with (
        pytest.raises(WriteError, match="cannot be written: No space"),
        staged_folder(tmp_path / "out", fingerprint=PRINT),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_the_lock_goes_with_the_process(tmp_path):
    with pytest.raises(KeyboardInterrupt), staged_folder(tmp_path / "out", fingerprint=PRINT):
        raise KeyboardInterrupt
    with (tmp_path / ".out.partial" / ".secure_loader_lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
