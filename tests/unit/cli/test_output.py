"""What is printed: safe for a terminal, right for a program."""

from __future__ import annotations

import io
import json
import logging
import sys

import pytest

from secure_loader.cli import models, output
from secure_loader.cli.output import clean, count, facts, human_bytes, human_seconds, table

EVIL = "a\x1b[2Jb\r\u202ec\x00\n\x9b1m"


def write_header(path, names):
    text = json.dumps({name: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for name in names}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (2**21, "2 MiB"),
        (2**30 - 1, "1 GiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_sizes(n, text):
    assert human_bytes(n) == text


def test_small_words():
    assert human_seconds(0.0214) == "21 ms"
    assert human_seconds(2.04) == "2.0 s"
    assert count(1, "file") == "1 file"
    assert count(1200, "file") == "1,200 files"
    assert facts([("a", "1"), ("long", ""), ("bcd", "2")]) == ["  a    1", "  bcd  2"]
    assert table(["x", "size"], [["a", "5 B"]], right=(1,)) == ["  x  size", "  a   5 B"]


def test_clean():
    assert clean("plain ütf-8 文") == "plain ütf-8 文"
    assert clean(EVIL) == r"a\x1b[2Jb\r\u202ec\x00\n\x9b1m"
    assert clean("\ud800") == r"\ud800"


def test_names_from_files_cannot_drive_the_terminal(cli, tmp_path):
    write_header(tmp_path / "evil.safetensors", [EVIL, "\ud83d\ude00"])
    out = cli("inspect", "evil.safetensors", "--tensors").out
    assert clean(EVIL) in out
    assert all(c.isprintable() or c == "\n" for c in out)
    names = [t["name"] for t in cli("inspect", "evil.safetensors", "--tensors", "--json").json["tensors"]]
    assert EVIL in names


def test_file_names_cannot_either(cli, tmp_path):
    folder = tmp_path / "fold\x1b[31mer"
    folder.mkdir()
    write_header(folder / "x\x1b]0;title\x07.safetensors", ["a"])
    (folder / "other\x1b.txt").write_text("")
    for result in (cli("inspect", folder), cli("verify", folder, code=3)):
        text = result.out + result.err
        assert "\\x1b" in text
        assert "\x1b" not in text


def test_errors_cannot_either(cli, tmp_path):
    (tmp_path / "x").write_bytes(b"\x20\0\0\0\0\0\0\0" + b'{"\x1b[2J": {"dtype": "\x1b[5m"}}   ')
    err = cli("inspect", "x", code=6).err
    assert "\x1b" not in err


def test_bytes_that_are_no_text(command, tmp_path):
    name = b"caf\xe9.safetensors"
    write_header(tmp_path / name.decode("utf-8", "surrogateescape"), ["a"])
    for words in (("inspect", "."), ("inspect", ".", "--json")):
        assert "caf" in command(*words, PYTHONIOENCODING="ascii").out


def test_ascii_terminals(command, tmp_path):
    write_header(tmp_path / "x.safetensors", ["gewicht.ü"])
    assert r"gewicht.\xfc" in command("inspect", ".", "--tensors", PYTHONIOENCODING="ascii").out
    assert "gewicht.ü" in command("inspect", ".", "--tensors", PYTHONIOENCODING="utf-8").out


def test_json_is_one_document_of_ascii(cli, encrypted):
    for words in (
        ("keygen", "bob"),
        ("trust", "list"),
        ("trust", "export", "alice"),
        ("verify", encrypted),
        ("inspect", encrypted, "--tensors"),
        ("decrypt", encrypted, "plain"),
        ("rewrap", encrypted, "-k", "alice"),
        ("env",),
        ("config", "show"),
        ("trust", "remove", "bob"),
    ):
        result = cli(*words, "--json")
        assert isinstance(result.json, dict)
        assert result.out.isascii()
        assert result.err == ""


def test_warnings_are_json_as_well(cli, model):
    cli("keygen", "alice")
    (model / "x.bin").write_bytes(b"")
    result = cli("encrypt", model, "enc", "--json")
    assert "x.bin" in json.loads(result.err)["warning"]
    assert result.json["left_out"] == ["x.bin"]


def test_logs_are_shown_by_loudness(cli, monkeypatch):
    def logging_verify(path, **options):
        log = logging.getLogger("secure_loader.core.somewhere")
        log.debug("a detail")
        log.warning("mind %s", "this\x1b")
        raise KeyboardInterrupt

    monkeypatch.setattr(models.inspection, "verify", logging_verify)
    assert "secure-loader: warning: mind this\\x1b\n" in cli("verify", "x", code=130).err
    assert "detail" not in cli("verify", "x", code=130).err
    assert "secure_loader.core.somewhere: a detail" in cli("verify", "x", "-v", code=130).err
    assert "mind" not in cli("verify", "x", "-q", code=130).err
    assert logging.getLogger("secure_loader").handlers == []


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_colours_only_on_terminals_that_want_them(monkeypatch):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert output._paint("x", "red", io.StringIO()) == "x"
    assert output._paint("x", "red", Terminal()) == "\x1b[31mx\x1b[0m"
    monkeypatch.setenv("TERM", "dumb")
    assert output._paint("x", "red", Terminal()) == "x"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert output._paint("x", "red", Terminal()) == "x"


def test_the_bar_follows_loudness(cli, encrypted, monkeypatch):
    shown = []
    monkeypatch.setattr(
        models.inspection, "verify", lambda path, **options: shown.append(options["progress"]) or sys.exit(0)
    )
    for more in ([], ["-q"], ["--json"]):
        cli("verify", encrypted, *more)
    assert shown == [None, False, False]
