"""Tokens and other credentials of one word: from a variable, a file, or the answer of a service."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ...errors import KeyAccessError
from .. import strict_json
from ..secrets import Secret
from .lift import lift
from .local import read_private

# Printable, and nothing that JSON would have to escape.
_WORD = re.compile(rb"[!#-\[\]-~]+")


def one_word(text: bytearray, where: str) -> Secret:
    """The one line of a text; the text is wiped.

    Raises:
        KeyAccessError: It is something else, which is not shown.
    """
    with Secret(text) as whole:
        line = bytearray(whole.reveal())
        while line[-1:].isspace():
            line.pop()
        word = Secret(line)
    if not _WORD.fullmatch(word.reveal()):
        word.wipe()
        raise KeyAccessError(f"{where} does not hold one word of ASCII, which a token or secret id is")
    return word


def word_of_file(path: Path, what: str) -> Secret:
    """The word in a file that is kept as a key file is. Raises KeyAccessError."""
    return one_word(read_private(path, what), str(path))


def word_of_variable(name: str) -> Secret:
    """The word in an environment variable that is set. Raises KeyAccessError."""
    return one_word(bytearray(os.environb[name.encode()]), name)


def token_in(body: bytearray, *path: str) -> Secret:
    """The token in an answer.

    Args:
        body: UTF-8; the token is taken out of it, and it is to be wiped by the caller.
        path: Where it is: names of members, one inside the other.

    Raises:
        FormatError: Not JSON.
        KeyAccessError: No token is there.
    """
    pattern = rb'"%b"[ \t\r\n]*:[ \t\r\n]*"(?P<value>[!#-\[\]-~]{16,8192})"' % re.escape(path[-1].encode())
    lifted = lift(body, re.compile(pattern))
    found = strict_json.loads(bytes(body), what="answer", scan=True, any_number=True)
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    if not isinstance(found, str):
        raise KeyAccessError("the answer to the login holds no token")
    # A token of another form passes through a string.
    return lifted.get(found) or one_word(bytearray(found, "utf-8"), "the answer to the login")
