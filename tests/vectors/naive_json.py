"""A small, slow, strict JSON reader and the two base64 alphabets, written from docs/format.md D.2.

The standard `json` module forgives duplicates, NaN, floats and lone surrogates; rather than patch those out with hooks
(as a fast reader would) this one is a recursive descent over characters, so that a shared misunderstanding of the
hooks cannot hide in both readers.
"""

from __future__ import annotations

import base64
import binascii
import json


class RefusalError(Exception):
    """Every refusal; the class name of the subclass is the error the specification names."""


class FormatError(RefusalError):
    pass


class UnsupportedVersionError(FormatError):
    pass


class SignatureError(RefusalError):
    pass


class UntrustedSignerError(RefusalError):
    pass


class NotEncryptedError(RefusalError):
    pass


class ManifestError(RefusalError):
    pass


class RollbackError(RefusalError):
    pass


class AuthenticationError(RefusalError):
    pass


class KeyAccessError(RefusalError):
    pass


class PolicyDeniedError(RefusalError):
    pass


MAX_DEPTH = 16
MAX_INT = 2**63 - 1
ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
HEX = "0123456789abcdefABCDEF"


class _Reader:
    def __init__(self, text: str):
        self.text = text
        self.at = 0

    def peek(self) -> str:
        return self.text[self.at] if self.at < len(self.text) else ""

    def take(self, expected: str) -> None:
        if self.peek() != expected:
            raise FormatError(f"expected {expected!r} at {self.at}")
        self.at += 1

    def space(self) -> None:
        while self.peek() and self.peek() in " \t\r\n":
            self.at += 1

    def value(self, depth: int):
        self.space()
        c = self.peek()
        if c and c in "{[":
            if depth >= MAX_DEPTH:
                raise FormatError("nested too deeply")
            result = self.object(depth + 1) if c == "{" else self.array(depth + 1)
        elif c == '"':
            result = self.string()
        elif c and c in "0123456789":
            result = self.number()
        else:
            result = self.word()
        self.space()
        return result

    def word(self):
        for text, value in (("true", True), ("false", False), ("null", None)):
            if self.text.startswith(text, self.at):
                self.at += len(text)
                return value
        raise FormatError(f"unexpected character at {self.at}")

    def object(self, depth: int) -> dict:
        result: dict = {}
        self.take("{")
        self.space()
        if self.peek() == "}":
            self.at += 1
            return result
        while True:
            self.space()
            name = self.string()
            if name in result:
                raise FormatError(f"duplicate member {name!r}")
            self.space()
            self.take(":")
            result[name] = self.value(depth)
            if self.peek() == "}":
                self.at += 1
                return result
            self.take(",")

    def array(self, depth: int) -> list:
        result: list = []
        self.take("[")
        self.space()
        if self.peek() == "]":
            self.at += 1
            return result
        while True:
            result.append(self.value(depth))
            if self.peek() == "]":
                self.at += 1
                return result
            self.take(",")

    def number(self) -> int:
        start = self.at
        while self.peek() and self.peek() in "0123456789":
            self.at += 1
        digits = self.text[start : self.at]
        if self.peek() and self.peek() in ".eE+-":
            raise FormatError("only integers")
        if len(digits) > 1 and digits[0] == "0":
            raise FormatError("leading zero")
        if len(digits) > 19 or int(digits) > MAX_INT:
            raise FormatError("number too large")
        return int(digits)

    def string(self) -> str:
        self.take('"')
        out = []
        while True:
            c = self.peek()
            if c == "" or ord(c) < 0x20:
                raise FormatError("unterminated string or raw control character")
            self.at += 1
            if c == '"':
                return "".join(out)
            if c != "\\":
                out.append(c)
                continue
            e = self.peek()
            self.at += 1
            if e == "u":
                out.append(self.unicode_escape())
            elif e in ESCAPES and e:
                out.append(ESCAPES[e])
            else:
                raise FormatError("unknown escape")

    def unicode_escape(self) -> str:
        unit = self.hex4()
        if 0xDC00 <= unit < 0xE000:
            raise FormatError("lone surrogate")
        if 0xD800 <= unit < 0xDC00:
            self.take("\\")
            self.take("u")
            low = self.hex4()
            if not 0xDC00 <= low < 0xE000:
                raise FormatError("lone surrogate")
            unit = 0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00)
        return chr(unit)

    def hex4(self) -> int:
        digits = self.text[self.at : self.at + 4]
        if len(digits) != 4 or any(d not in HEX for d in digits):
            raise FormatError("bad \\u escape")
        self.at += 4
        return int(digits, 16)


def strict_json(raw: bytes | str):
    """The value of `raw`, or FormatError. The whole input must be one value (surrounding JSON white space allowed)."""
    if isinstance(raw, bytes):
        try:
            raw = raw.decode("utf-8", "strict")
        except UnicodeDecodeError:
            raise FormatError("not UTF-8") from None
    reader = _Reader(raw)
    value = reader.value(0)
    if reader.at != len(raw):
        raise FormatError("trailing characters")
    return value


def compact(value, sort: bool = False) -> str:
    """The one serialisation the specification knows (A.2)."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=sort)


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def b64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def unb64(text, what: str) -> bytes:
    """Standard alphabet, padded, canonical: what encodes back to itself."""
    if not isinstance(text, str):
        raise FormatError(f"{what} is not a string")
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except (UnicodeEncodeError, binascii.Error):
        raise FormatError(f"{what} is not base64") from None
    if b64(data) != text:
        raise FormatError(f"{what} is not canonical base64")
    return data


def unb64url(text, what: str) -> bytes:
    """URL alphabet without padding, canonical."""
    if not isinstance(text, str):
        raise FormatError(f"{what} is not a string")
    try:
        data = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (UnicodeEncodeError, binascii.Error):
        raise FormatError(f"{what} is not base64url") from None
    if b64url(data) != text:
        raise FormatError(f"{what} is not canonical base64url")
    return data


def members(value, required: set[str], optional: set[str], what: str) -> dict:
    """`value` as an object with all of `required` and nothing beyond `optional`."""
    if not isinstance(value, dict):
        raise FormatError(f"{what} is not an object")
    missing, unknown = required - set(value), set(value) - required - optional
    if missing or unknown:
        raise FormatError(f"{what}: missing {sorted(missing)}, unknown {sorted(unknown)}")
    return value
