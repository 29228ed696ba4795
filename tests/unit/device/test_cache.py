"""The cache of compiled device code: who may have written what is run next to the keys."""

from __future__ import annotations

import os
import stat

import pytest

from secure_loader.core.device import cache
from secure_loader.core.device.cache import compiled, load, name_of, store
from secure_loader.core.device.sources import Sources
from secure_loader.core.home import cache_dir
from secure_loader.errors import DeviceError

SOURCE = Sources({"a.cu": "text"})
KEY = name_of(SOURCE.fingerprint, 90, "13.0")


class Compiler:
    """Counts how often it is asked."""

    version = "13.0"

    def __init__(self) -> None:
        self.asked = 0

    def compile(self, sources: Sources, arch: int) -> bytes:
        self.asked += 1
        return f"machine code of {sources.fingerprint} for {arch}".encode()


@pytest.fixture
def folder(secure_loader_home):
    return cache_dir() / "cubins"


@pytest.fixture
def kept(folder):
    store(folder, KEY, b"image")
    return folder / f"{KEY}.cubin"


def test_compiled_once(folder):
    compiler = Compiler()
    first = compiled(SOURCE, 90, compiler)
    assert compiled(SOURCE, 90, compiler) == first
    assert compiler.asked == 1
    for other in (
        (Sources({"a.cu": "other"}), 90),
        (SOURCE, 100),
    ):
        assert compiled(*other, compiler) != first
    assert compiler.asked == 3
    compiler.version = "13.1"
    compiled(SOURCE, 90, compiler)
    assert compiler.asked == 4


def test_only_the_owner_can_read_it(kept, folder):
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert load(folder, KEY) == b"image"


def test_the_name_holds_everything_that_decides(monkeypatch):
    names = {
        KEY,
        name_of("other", 90, "13.0"),
        name_of(SOURCE.fingerprint, 91, "13.0"),
        name_of(SOURCE.fingerprint, 90, "13.1"),
    }
    monkeypatch.setattr(cache, "OPTIONS", ("--other",))
    assert len(names | {name_of(SOURCE.fingerprint, 90, "13.0")}) == 5


def test_nothing_there(tmp_path, kept, folder):
    assert load(tmp_path / "none", KEY) is None
    assert load(folder, name_of("other", 90, "13.0")) is None


@pytest.mark.parametrize(
    "change", [lambda d: d[:-1], lambda d: d + b"\0", lambda d: b"\0" + d[1:], lambda d: d[:20], lambda _: b""]
)
def test_damaged(kept, folder, change, caplog):
    good = kept.read_bytes()
    kept.write_bytes(change(good))
    assert load(folder, KEY) is None
    assert "is damaged" in caplog.text
    made = compiled(SOURCE, 90, Compiler())
    assert load(folder, KEY) == made, "made again"


def test_under_another_name(kept, folder):
    other = name_of(SOURCE.fingerprint, 100, "13.0")
    kept.rename(folder / f"{other}.cubin")
    assert load(folder, other) is None


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write(kept, folder, mode):
    kept.chmod(mode)
    with pytest.raises(DeviceError, match=f"can be written by others.*{mode:04o}"):
        load(folder, KEY)


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o1777])
def test_a_folder_that_others_can_write(kept, folder, mode):
    folder.chmod(mode)
    with pytest.raises(DeviceError, match="can be written by others"):
        load(folder, KEY)
    with pytest.raises(DeviceError, match="can be written by others"):
        store(folder, KEY, b"image")
    compiler = Compiler()
    for turn in (1, 2):
        assert compiled(SOURCE, 90, compiler) == Compiler().compile(SOURCE, 90)
        assert compiler.asked == turn, "compiled again rather than trusted"


def test_links_are_not_followed(kept, folder, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(DeviceError, match="cannot be read"):
        load(link, KEY)
    with pytest.raises(DeviceError, match="is a link"):
        store(link, KEY, b"image")
    elsewhere = tmp_path / "elsewhere.cubin"
    kept.rename(elsewhere)
    kept.symlink_to(elsewhere)
    with pytest.raises(DeviceError, match="cannot be read"):
        load(folder, KEY)


def test_what_is_no_file(kept, folder):
    kept.unlink()
    os.mkfifo(kept, 0o600)
    with pytest.raises(DeviceError, match="is no file of ours"):
        load(folder, KEY)
    kept.unlink()
    kept.mkdir()
    with pytest.raises(DeviceError, match="is no file of ours"):
        load(folder, KEY)


def test_too_large(kept, folder, monkeypatch):
    monkeypatch.setattr(cache, "_MAX_BYTES", 20)
    with pytest.raises(DeviceError, match="is no file of ours"):
        load(folder, KEY)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_of_another_user(kept, folder):
    os.chown(kept, 12345, -1)
    with pytest.raises(DeviceError, match="belongs to another user"):
        load(folder, KEY)
    os.chown(kept, 0, -1)
    os.chown(folder, 12345, -1)
    with pytest.raises(DeviceError, match="belongs to another user"):
        load(folder, KEY)


def test_a_home_that_cannot_be_written_costs_time_only(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SECURE_LOADER_HOME", str(tmp_path / "file" / "home"))
    assert compiled(SOURCE, 90, Compiler()) == Compiler().compile(SOURCE, 90)
    assert "not kept" in caplog.text or "not used" in caplog.text


def test_the_oldest_go(folder):
    names = [name_of(str(i), 90, "13.0") for i in range(40)]
    for i, name in enumerate(names):
        store(folder, name, b"image")
        os.utime(folder / f"{name}.cubin", (i, i))
    store(folder, KEY, b"image")
    left = {p.stem for p in folder.iterdir()}
    assert KEY in left
    assert left - {KEY} == set(names[-31:])


def test_where_it_is(monkeypatch, tmp_path):
    assert cache_dir().name == "cache"
    monkeypatch.delenv("SECURE_LOADER_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "secure_loader"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "secure_loader"
