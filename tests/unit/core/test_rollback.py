"""The highest release of each model that was seen here."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from secure_loader.core.home import state_dir
from secure_loader.core.rollback import check_release
from secure_loader.errors import RollbackError


def floors() -> dict[str, int]:
    return json.loads((state_dir() / "releases.json").read_text())


def test_the_floor_rises_and_holds():
    check_release("m", "thumb", 3)
    check_release("m", "thumb", 3)
    check_release("m", "thumb", 5)
    assert floors() == {"m@thumb": 5}
    with pytest.raises(RollbackError, match="release 4 of 'm' is older than release 5"):
        check_release("m", "thumb", 4)
    assert floors() == {"m@thumb": 5}


def test_nobody_raises_the_floor_of_somebody_else():
    check_release("m", "mallory", 1000)
    check_release("m", "thumb", 1)
    check_release("other", "thumb", 1)
    assert floors() == {"m@mallory": 1000, "m@thumb": 1, "other@thumb": 1}


def test_the_folder_is_private():
    check_release("m", "thumb", 0)
    assert state_dir().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("text", ["", "[]", '{"m@thumb":"5"}', '{"m@thumb":-1}', '{"m@thumb":5,"m@thumb":1}', "{" * 50])
def test_a_damaged_record_is_not_an_empty_one(text):
    check_release("m", "thumb", 5)
    (state_dir() / "releases.json").write_text(text)
    with pytest.raises(RollbackError, match="the record of releases"):
        check_release("m", "thumb", 6)


def test_a_home_that_cannot_be_written_still_holds_the_floor(monkeypatch, caplog):
    check_release("m", "thumb", 5)

    def readonly(path):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("secure_loader.core.rollback.private_folder", readonly)
    with pytest.raises(RollbackError):
        check_release("m", "thumb", 4)
    with caplog.at_level(logging.WARNING):
        check_release("m", "thumb", 6)
    assert "cannot remember release 6 of m" in caplog.text
    assert floors() == {"m@thumb": 5}


def test_many_processes_at_once():
    code = "import sys; from secure_loader.core.rollback import check_release\nfor i in range(20): check_release(sys.argv[1], 't', i)"
    running = [subprocess.Popen([sys.executable, "-c", code, name]) for name in "abc"]
    assert [p.wait(timeout=60) for p in running] == [0, 0, 0]
    assert floors() == {"a@t": 19, "b@t": 19, "c@t": 19}
