"""``pkcs11:token=…;object=…``: an AES key on an HSM or smart card, by RFC 7512 and the vendor's PKCS#11 module.

The key wraps master keys with AES-GCM where it is, and need not be extractable. The module runs in a child process
(:mod:`core.keys.pkcs11_child`) for each request: it may crash or hang, and none of its code is in this process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import os
import re
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote_from_bytes, unquote_to_bytes

from ...errors import (
    ConfigError,
    KeyAccessError,
    KeySourceDeniedError,
    KeySourceResponseError,
    KeySourceUnreachableError,
)
from ..forks import ForkLock
from ..home import refuse_foreign
from ..recipient import Recipient, WrapContext
from ..secrets import Secret, looks_like_key, wipe
from .held import held
from .helper import HelperError, ask_helper
from .local import path_of, read_private, take_variable
from .net import Deadline
from .wrapping import WrappingProvider

MODULE_VARIABLE = "SECURE_LOADER_PKCS11_MODULE"
PIN_VARIABLE = "SECURE_LOADER_PKCS11_PIN"
_CHILD = os.path.join(os.path.dirname(__file__), "pkcs11_child.py")
# What tells tokens apart, then what tells keys apart: in this order they stand in files.
_TOKEN, _OBJECT = ("token", "manufacturer", "serial", "model"), ("object", "id")
_HINT = "pkcs11:token=LABEL;object=LABEL?module-path=/path/of/module.so&pin-source=file:/path/of/pin"
# What RFC 7512 lets stand as it is, but for what would end the attribute.
_PLAIN = ":[]@!$'()*+=-._~"
_PART = re.compile(r"([a-z-]+)=((?:[A-Za-z0-9:\[\]@!$'()*+,=._~/?|-]|%[0-9A-Fa-f]{2})+)")
_MAX_PIN = 256
_PRIVATE = re.compile(r"^SECURE_LOADER_|TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE", re.IGNORECASE)
_KINDS = {
    "unreachable": KeySourceUnreachableError,
    "denied": KeySourceDeniedError,
    "response": KeySourceResponseError,
    "access": KeyAccessError,
}

# PINs that a token refused, as codes under a key of this process; and one request at a time, so that they are known.
_refused: set[bytes] = set()
_blind = os.urandom(32)
_lock = ForkLock()
_at_it: tuple[int, weakref.ref[_Turn]] | None = None


@dataclass(frozen=True, slots=True)
class Uri:
    """A PKCS#11 URI.

    Attributes:
        token: What the token must say about itself, by the names of RFC 7512.
        object: What the key must be: ``object``, its label, and ``id`` in hex.
        name: All that in the URI's own spelling, always the same.
        module: Path of the module, or None.
        pin: Path of the file that holds the PIN, or None.
    """

    token: dict[str, str]
    object: dict[str, str]
    name: str
    module: str | None
    pin: str | None


class Pkcs11Provider(WrappingProvider):
    """AES keys on tokens."""

    alg = "pkcs11"

    def kid(self, reference: str) -> str:
        """See :meth:`WrappingProvider.kid`: what names token and key, without module and PIN."""
        return parse_uri(reference).name

    def opens(self, reference: str, entry: Recipient) -> bool:
        """See :meth:`WrappingProvider.opens`: whatever both names say is the same, and that is a key's label or id."""
        ours = parse_uri(reference)
        try:
            theirs = parse_uri(entry.kid)
        except KeyAccessError:
            return False
        return all(
            mine[name] == other[name]
            for mine, other in ((ours.token, theirs.token), (ours.object, theirs.object))
            for name in mine.keys() & other.keys()
        ) and bool(ours.object.keys() & theirs.object.keys())

    def wrap_key(self, reference: str, master: Secret, context: WrapContext) -> bytes:
        """See :meth:`WrappingProvider.wrap_key`: a 12-byte nonce, the ciphertext, a 16-byte tag."""
        return bytes(self._ask(reference, bytearray(master.reveal()), context, wrap=True))

    def unwrap_key(self, reference: str, wrapped: bytes, context: WrapContext) -> Secret:
        """See :meth:`WrappingProvider.unwrap_key`."""
        return Secret(self._ask(reference, bytearray(wrapped), context, wrap=False))

    def _ask(self, reference: str, data: bytearray, context: WrapContext, *, wrap: bool) -> bytearray:
        """One request; ``data`` is wiped."""
        try:
            uri = parse_uri(reference)
            module = _module(uri)
            deadline = Deadline(self.seconds)
            try:
                with _turn(deadline), _alone_with(uri, deadline), _find_pin(uri) as pin:
                    request = {
                        "module": module,
                        "token": uri.token,
                        "object": uri.object,
                        "wrap": wrap,
                        "aad": context.encode().hex(),
                        "pin": len(pin) or None,
                        "data": len(data),
                        "seconds": deadline.left(),
                    }
                    return _answer(uri, request, pin, data, deadline)
            except TimeoutError:
                raise KeySourceUnreachableError(
                    f"{source(uri)}: no answer within {self.seconds:g} s", hint="is the device in order?"
                ) from None
        finally:
            wipe(data)


def source(uri: Uri) -> str:
    """What messages call a key: nothing of where its PIN is."""
    return f"key source pkcs11:{uri.name}"


def parse_uri(reference: str) -> Uri:
    """A PKCS#11 URI, without its scheme.

    Raises:
        KeyAccessError: It names no key, says something twice or something unknown, or holds a PIN.
    """
    path, _, query = reference.partition("?")
    where = _attributes(path, ";", (*_TOKEN, *_OBJECT, "type"))
    how = _attributes(query, "&", ("module-path", "pin-source", "pin-value")) if query else {}
    if "pin-value" in how:
        raise KeyAccessError(
            "a pkcs11: reference holds the PIN itself; references are shown in logs and messages",
            hint="pin-source=file:/path/of/pin, with mode 0600",
        )
    if where.pop("type", b"secret-key") != b"secret-key" or not where.keys() & set(_OBJECT):
        raise KeyAccessError("a pkcs11: reference names no secret key, by object or id", hint=_HINT)
    name = ";".join(f"{n}={_quote(n, where[n])}" for n in (*_TOKEN, *_OBJECT) if n in where)
    found = {n: value.hex() if n == "id" else _text(n, value) for n, value in where.items()}
    return Uri(
        token={n: found[n] for n in _TOKEN if n in found},
        object={n: found[n] for n in _OBJECT if n in found},
        name=name,
        module=_text("module-path", how["module-path"]) if "module-path" in how else None,
        pin=_text("pin-source", how["pin-source"]) if "pin-source" in how else None,
    )


def _attributes(text: str, between: str, known: tuple[str, ...]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for part in text.split(between):
        parsed = _PART.fullmatch(part)
        # What it says is not repeated: it may be a PIN.
        if parsed is None:
            raise KeyAccessError("a pkcs11: reference is no PKCS#11 URI (RFC 7512)", hint=_HINT)
        if parsed[1] not in known:
            raise KeyAccessError(f"a pkcs11: reference says {parsed[1][:40]}, which is not understood", hint=_HINT)
        if parsed[1] in found:
            raise KeyAccessError(f"a pkcs11: reference says {parsed[1]} twice", hint=_HINT)
        found[parsed[1]] = unquote_to_bytes(parsed[2])
    return found


def _text(name: str, value: bytes) -> str:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        text = "\0"
    if not text.isprintable():
        raise KeyAccessError(f"a pkcs11: reference holds characters in {name} that cannot be shown", hint=_HINT)
    return text


def _quote(name: str, value: bytes) -> str:
    return "".join(f"%{b:02X}" for b in value) if name == "id" else quote_from_bytes(value, safe=_PLAIN)


def _module(uri: Uri) -> str:
    """Path of the module, whose code will see PIN and keys."""
    named = uri.module or os.environ.get(MODULE_VARIABLE)
    if not named:
        raise KeyAccessError(
            f"{source(uri)}: no PKCS#11 module is named",
            hint=f"set {MODULE_VARIABLE}, or add ?module-path=/usr/lib/softhsm/libsofthsm2.so",
        )
    path = Path(named)
    if not path.is_absolute() or not path.is_file():
        raise KeyAccessError(f"{source(uri)}: the module must be a file, with its whole path", path=path)
    try:
        refuse_foreign(path.stat(), path, "PKCS#11 module")
    except ConfigError as e:
        raise KeyAccessError(e.message, path=path, hint=e.hint) from None
    return named


def _find_pin(uri: Uri) -> Secret:
    """The PIN: from the file that the reference names, or from the variable; empty where there is none."""
    if uri.pin is not None:
        path = _pin_path(uri.pin)
        return _one_line(read_private(path, "PIN file"), f"PIN file {path}")
    with held() as table:
        if PIN_VARIABLE in os.environ:
            table[PIN_VARIABLE] = _one_line(take_variable(PIN_VARIABLE), PIN_VARIABLE)
        remembered = table.get(PIN_VARIABLE)
        return Secret(remembered.reveal() if isinstance(remembered, Secret) else b"")


def _pin_path(text: str) -> Path:
    path = path_of(text.removeprefix("file:"))
    if not path.is_absolute():
        raise KeyAccessError("pin-source of a pkcs11: reference is no absolute path of a file", hint=_HINT)
    return path


def _one_line(data: bytearray, what: str) -> Secret:
    """A PIN without its line end; ``data`` is wiped."""
    with Secret(data) as whole:
        pin = bytearray(whole.reveal())
    while pin and pin[-1] in b"\r\n":
        pin.pop()
    if not 0 < len(pin) <= _MAX_PIN or any(b < 0x20 for b in pin):
        wipe(pin)
        raise KeyAccessError(f"{what} does not hold a PIN: one line of at most {_MAX_PIN} bytes")
    return Secret(pin)


class _Turn:
    """Held by the thread whose turn it is. Where a signal ends the thread's work before it can give it back, it is over with it."""


@contextlib.contextmanager
def _turn(deadline: Deadline) -> Iterator[None]:
    """No other thread of this process asks meanwhile. A lock would let the last of many wait for all their deadlines.

    Raises:
        TimeoutError: The others take too long.
    """
    global _at_it  # noqa: PLW0603 - guarded by the lock
    mine = _Turn()
    while True:
        with _lock.here:
            if _whose_turn() is None:
                _at_it = os.getpid(), weakref.ref(mine)
                break
        time.sleep(min(0.005, deadline.left()))
    try:
        yield
    finally:
        with _lock.here:
            if _whose_turn() is mine:
                _at_it = None


def _whose_turn() -> _Turn | None:
    # A process that was forked meanwhile has no such thread.
    return _at_it[1]() if _at_it is not None and _at_it[0] == os.getpid() else None


@contextlib.contextmanager
def _alone_with(uri: Uri, deadline: Deadline) -> Iterator[None]:
    """No other process shows the PIN from the same file meanwhile.

    So each of them is told by the token what became of the one before it, and many workers with one wrong PIN do not
    lock it.

    Raises:
        TimeoutError: Somebody else takes too long.
    """
    with contextlib.ExitStack() as stack:
        if uri.pin is not None:
            _lock_file(_pin_path(uri.pin), stack, deadline)
        yield


def _lock_file(path: Path, stack: contextlib.ExitStack, deadline: Deadline) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return  # reading it will tell
    stack.callback(os.close, fd)
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(min(0.01, deadline.left()))
        except OSError:
            return  # a file system without locks
        else:
            return


def _answer(uri: Uri, request: dict[str, object], pin: Secret, data: bytearray, deadline: Deadline) -> bytearray:
    """What the child says to a request."""
    keyed = hmac.new(_blind, uri.name.encode() + b"\0", "sha256")
    keyed.update(pin.reveal())
    code = keyed.digest()
    if code in _refused:
        # Opening the next file of the model would count as the next wrong PIN, and the third locks the token.
        raise KeySourceDeniedError(
            f"{source(uri)}: the token refused this PIN before; it is not tried again",
            hint="put the right one in its place; then this process tries that",
        )
    line = json.dumps(request).encode() + b"\n"
    # Made in one piece: a buffer that grows leaves copies behind.
    question = bytearray(len(line) + len(pin) + len(data))
    question[: len(line)] = line
    question[len(line) : len(line) + len(pin)] = pin.reveal()
    question[len(line) + len(pin) :] = data
    # Modules are set up by variables of their own. What is a secret of somebody else's is none of their business.
    env = {n: v for n, v in os.environ.items() if not _PRIVATE.search(n) and not looks_like_key(v)}
    try:
        answer = ask_helper(_CHILD, question, deadline, env=env)
    except HelperError as e:
        raise KeySourceUnreachableError(f"{source(uri)}: the process with the module {e}") from None
    finally:
        wipe(question)
    if answer[:1] == b"+":
        del answer[:1]
        return answer
    try:
        refusal = json.loads(answer[1:])
        kind, text, wrong_pin = _KINDS[refusal["kind"]], str(refusal["text"])[:300], refusal["pin"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise KeySourceResponseError(f"{source(uri)}: the process with the module says something else") from None
    if wrong_pin:
        _refused.add(code)
    raise kind(f"{source(uri)}: {text}")
