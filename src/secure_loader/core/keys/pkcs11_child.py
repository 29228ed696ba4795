"""The child process that speaks to a PKCS#11 module. Run by path as ``python -I -S``; nothing imports it.

A vendor's module is native code with threads and sockets of its own, which may crash or never return. Here it does that
alone. Only the C interface of PKCS#11 2.20 and CKM_AES_GCM are used, so nothing needs to be installed for it.

On stdin comes a line of JSON, then the PIN, then the data: ``module``, ``token`` and ``object`` (what they must be),
``wrap`` (or unwrap), ``aad`` in hex, ``pin`` and ``data`` (their lengths; a PIN of null is none), ``seconds`` until nobody
waits any more. On stdout goes ``+`` and the result, or ``-`` and a line of JSON: ``kind``, ``text``, and whether it is the
``pin`` that was refused. Wrapped is a 12-byte nonce, the ciphertext, and a 16-byte tag.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys

TYPE_CHECKING = False  # as typing's, which takes as long to import as everything else here
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, BinaryIO

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
# Places in CK_FUNCTION_LIST, behind its version.
INITIALIZE, FINALIZE, SLOT_LIST, TOKEN_INFO = 0, 1, 4, 6
OPEN_SESSION, CLOSE_SESSION, LOGIN, ATTRIBUTES = 12, 13, 18, 24
FIND_INIT, FIND, FIND_FINAL = 26, 27, 28
ENCRYPT_INIT, ENCRYPT, DECRYPT_INIT, DECRYPT = 29, 30, 33, 34
SERIAL_SESSION, USER = 4, 1
LOGIN_REQUIRED, INITIALIZED, FINAL_TRY, LOCKED = 0x4, 0x400, 0x20000, 0x40000
CLASS, LABEL, KEY_TYPE, ID, SENSITIVE = 0x0, 0x3, 0x100, 0x102, 0x103
SECRET_KEY, AES, AES_GCM = 4, 0x1F, 0x1087
NONCE, TAG = 12, 16
MAX_SLOTS = 256

PIN_INCORRECT, PIN_LOCKED, BUFFER_TOO_SMALL = 0xA0, 0xA4, 0x150
NAMES = {
    0x2: "HOST_MEMORY", 0x5: "GENERAL_ERROR", 0x6: "FUNCTION_FAILED", 0x7: "ARGUMENTS_BAD", 0x1B: "ACTION_PROHIBITED",
    0x30: "DEVICE_ERROR", 0x31: "DEVICE_MEMORY", 0x32: "DEVICE_REMOVED", 0x35: "AEAD_DECRYPT_FAILED", 0x40: "ENCRYPTED_DATA_INVALID",
    0x41: "ENCRYPTED_DATA_LEN_RANGE", 0x54: "FUNCTION_NOT_SUPPORTED", 0x60: "KEY_HANDLE_INVALID", 0x63: "KEY_TYPE_INCONSISTENT",
    0x68: "KEY_FUNCTION_NOT_PERMITTED", 0x70: "MECHANISM_INVALID", 0x71: "MECHANISM_PARAM_INVALID", 0xA0: "PIN_INCORRECT",
    0xA1: "PIN_INVALID", 0xA2: "PIN_LEN_RANGE", 0xA3: "PIN_EXPIRED", 0xA4: "PIN_LOCKED", 0xB1: "SESSION_COUNT",
    0xE0: "TOKEN_NOT_PRESENT", 0xE1: "TOKEN_NOT_RECOGNIZED", 0x101: "USER_NOT_LOGGED_IN", 0x102: "USER_PIN_NOT_INITIALIZED",
}  # fmt: skip
WRONG_PIN = {0xA0, 0xA1, 0xA2}
DENIED = WRONG_PIN | {0x1B, 0x68, 0xA3, 0xA4, 0x101, 0x102}
OUT_OF_ORDER = {0x2, 0x5, 0x6, 0x30, 0x31, 0x32, 0xB1, 0xE0, 0xE1}
# What a module says when a tag is wrong; SoftHSM 2 has the general error for it.
NOT_OPENED = {0x5, 0x6, 0x35, 0x40, 0x41}

Ulong = ctypes.c_ulong


class Attribute(ctypes.Structure):
    """CK_ATTRIBUTE."""

    _fields_ = (("type", Ulong), ("value", ctypes.c_void_p), ("length", Ulong))


class Mechanism(ctypes.Structure):
    """CK_MECHANISM."""

    _fields_ = (("mechanism", Ulong), ("parameter", ctypes.c_void_p), ("length", Ulong))


class Gcm(ctypes.Structure):
    """CK_GCM_PARAMS."""

    _fields_ = (
        ("iv", ctypes.c_void_p),
        ("iv_length", Ulong),
        ("iv_bits", Ulong),
        ("aad", ctypes.c_void_p),
        ("aad_length", Ulong),
        ("tag_bits", Ulong),
    )


class Token(ctypes.Structure):
    """CK_TOKEN_INFO."""

    _fields_ = (
        ("token", ctypes.c_char * 32),
        ("manufacturer", ctypes.c_char * 32),
        ("model", ctypes.c_char * 16),
        ("serial", ctypes.c_char * 16),
        ("flags", Ulong),
        ("counts", Ulong * 10),
        ("versions", ctypes.c_char * 4),
        ("time", ctypes.c_char * 16),
    )


class RefusedError(Exception):
    """It cannot be done.

    Args:
        kind: ``unreachable``, ``denied``, ``response``, or ``access`` for what the operator has to mend.
        text: Why.
        pin: Whether the token did not take the PIN.
    """

    def __init__(self, kind: str, text: str, *, pin: bool = False) -> None:
        super().__init__(text)
        self.answer = {"kind": kind, "text": text, "pin": pin}


class Module:
    """A module, and its functions by their place."""

    def __init__(self, path: str) -> None:
        try:
            # Kept: what it has is unmapped with it.
            self._library = ctypes.CDLL(path)
            get = self._library.C_GetFunctionList
        except (OSError, AttributeError) as e:
            raise RefusedError("access", f"the module cannot be used: {str(e)[:200]}") from None
        table = ctypes.POINTER(Ulong)()
        check("C_GetFunctionList", get(ctypes.byref(table)))
        # CK_VERSION takes the first word; function pointers are as long as CK_ULONG.
        self._table = table
        self._call = ctypes.CFUNCTYPE(Ulong)

    def do(self, name: str, place: int, *values: Any) -> None:
        """Call a function. Raises RefusedError."""
        check(name, self.call(place, *values))

    def call(self, place: int, *values: Any) -> int:
        """What a function returns."""
        found: Callable[..., int] = self._call(self._table[1 + place])
        return found(*values)

    def slots(self) -> list[int]:
        """Slots that have a token."""
        ids, count = (Ulong * MAX_SLOTS)(), Ulong(MAX_SLOTS)
        self.do("C_GetSlotList", SLOT_LIST, 1, ids, ctypes.byref(count))
        return list(ids[: min(count.value, MAX_SLOTS)])

    def token(self, slot: int) -> Token:
        """What the token in a slot says about itself."""
        info = Token()
        self.do("C_GetTokenInfo", TOKEN_INFO, Ulong(slot), ctypes.byref(info))
        return info


def main() -> None:
    """Answer the request on stdin."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    # If whoever asked is gone, nobody else ends a module that hangs, and modules ignore what they like but for this.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # What a module prints is not an answer.
    answer = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    source = sys.stdin.buffer
    request = json.loads(source.readline())
    # Should the thread that asked live on without waiting.
    signal.setitimer(signal.ITIMER_REAL, request["seconds"] + 1)
    module = None
    try:
        module = Module(request["module"])
        module.do("C_Initialize", INITIALIZE, None)
        result = b"+" + respond(module, request, source)
    except RefusedError as e:
        result = b"-" + json.dumps(e.answer).encode()
    os.write(answer, result)
    os.close(answer)
    if module is not None:
        module.call(FINALIZE, None)


def respond(module: Module, request: dict[str, Any], source: BinaryIO) -> bytes:
    """Find the key, and use it."""
    slot, info = find_token(module, request["token"])
    pin = None if request["pin"] is None else source.read(request["pin"])
    data = source.read(request["data"])
    session = Ulong()
    module.do("C_OpenSession", OPEN_SESSION, Ulong(slot), Ulong(SERIAL_SESSION), None, None, ctypes.byref(session))
    try:
        if info.flags & LOGIN_REQUIRED:
            log_in(module, session, info, pin)
        key = find_key(module, session, request["object"])
        work = Work(module, session, key, bytes.fromhex(request["aad"]))
        return work.wrap(data) if request["wrap"] else work.unwrap(data)
    finally:
        module.call(CLOSE_SESSION, session)


def find_token(module: Module, wanted: dict[str, str]) -> tuple[int, Token]:
    """The one token that is meant: a PIN goes to no other."""
    found = []
    for slot in module.slots():
        info = module.token(slot)
        # Padded with blanks; some modules pad with zeros instead.
        says = {name: getattr(info, name).decode("utf-8", "replace").rstrip(" \0") for name in wanted}
        if info.flags & INITIALIZED and says == wanted:
            found.append((slot, info))
    if not found:
        raise RefusedError("unreachable", "there is no such token")
    if len(found) > 1:
        raise RefusedError("access", f"{len(found)} tokens could be meant")
    return found[0]


def log_in(module: Module, session: Ulong, info: Token, pin: bytes | None) -> None:
    """Show the PIN, once, unless one more wrong one would lock the token."""
    if info.flags & LOCKED:
        raise RefusedError("denied", "the token is locked, after too many wrong PINs")
    if info.flags & FINAL_TRY:
        raise RefusedError("denied", "one more wrong PIN would lock the token, so none is tried")
    if pin is None:
        raise RefusedError("access", "the token asks for a PIN, and there is none")
    code = module.call(LOGIN, session, Ulong(USER), pin, Ulong(len(pin)))
    if code in WRONG_PIN:
        raise RefusedError("denied", f"the token refuses the PIN ({named(code)})", pin=True)
    check("C_Login", code)


def find_key(module: Module, session: Ulong, wanted: dict[str, str]) -> Ulong:
    """Handle of the one AES key that is meant."""
    values = {
        CLASS: Ulong(SECRET_KEY),
        KEY_TYPE: Ulong(AES),
        **{
            kind: ctypes.create_string_buffer(raw, len(raw))
            for kind, raw in (
                (LABEL, wanted.get("object", "").encode()),
                (ID, bytes.fromhex(wanted.get("id", ""))),
            )
            if raw
        },
    }
    template = (Attribute * len(values))(
        *(Attribute(kind, ctypes.addressof(value), ctypes.sizeof(value)) for kind, value in values.items())
    )
    handles, count = (Ulong * 2)(), Ulong()
    module.do("C_FindObjectsInit", FIND_INIT, session, template, Ulong(len(values)))
    module.do("C_FindObjects", FIND, session, handles, Ulong(2), ctypes.byref(count))
    module.do("C_FindObjectsFinal", FIND_FINAL, session)
    if count.value != 1:
        several = "has several such AES keys" if count.value else "has no such AES key"
        raise RefusedError("access" if count.value else "response", f"the token {several}")
    return Ulong(handles[0])


class Work:
    """AES-GCM with a key of the token, for one context."""

    def __init__(self, module: Module, session: Ulong, key: Ulong, aad: bytes) -> None:
        self._module, self._session, self._key = module, session, key
        self._aad = aad

    def wrap(self, data: bytes) -> bytes:
        """Nonce, ciphertext and tag, from which the token makes ``data`` again."""
        if not self._sensitive():
            raise RefusedError("access", "the token hands the key out in clear (CKA_SENSITIVE is false)")
        nonce = os.urandom(NONCE)
        code, sealed = self._use(ENCRYPT_INIT, ENCRYPT, nonce, data)
        check("AES-GCM", code)
        # Some tokens take nonces of their own only, and say so in other ways.
        code, again = self._use(DECRYPT_INIT, DECRYPT, nonce, sealed)
        if code or again != data or len(sealed) != len(data) + TAG:
            raise RefusedError("response", "the token does not open what it has just wrapped")
        return nonce + sealed

    def unwrap(self, wrapped: bytes) -> bytes:
        """What was wrapped."""
        code, data = self._use(DECRYPT_INIT, DECRYPT, wrapped[:NONCE], wrapped[NONCE:])
        if code in NOT_OPENED:
            raise RefusedError(
                "denied", f"the key does not open it: it was wrapped with another, or for another model ({named(code)})"
            )
        check("AES-GCM", code)
        return data

    def _use(self, init: int, act: int, nonce: bytes, data: bytes) -> tuple[int, bytes]:
        iv, aad = (ctypes.create_string_buffer(b, len(b)) for b in (nonce, self._aad))
        gcm = Gcm(ctypes.addressof(iv), NONCE, 8 * NONCE, ctypes.addressof(aad), len(self._aad), 8 * TAG)
        mechanism = Mechanism(AES_GCM, ctypes.addressof(gcm), ctypes.sizeof(gcm))
        check("AES-GCM", self._module.call(init, self._session, ctypes.byref(mechanism), self._key))
        out, size = ctypes.create_string_buffer(len(data) + 2 * TAG), Ulong(len(data) + 2 * TAG)
        code = self._module.call(act, self._session, data, Ulong(len(data)), out, ctypes.byref(size))
        return code, b"" if code else out.raw[: size.value]

    def _sensitive(self) -> bool:
        value = ctypes.c_ubyte()
        wanted = Attribute(SENSITIVE, ctypes.addressof(value), 1)
        self._module.do("C_GetAttributeValue", ATTRIBUTES, self._session, self._key, ctypes.byref(wanted), Ulong(1))
        return value.value == 1


def check(what: str, code: int) -> None:
    """Raise RefusedError for anything but CKR_OK."""
    if code:
        kind = "denied" if code in DENIED else "unreachable" if code in OUT_OF_ORDER else "response"
        raise RefusedError(kind, f"{what} fails ({named(code)})")


def named(code: int) -> str:
    """A return value, as PKCS#11 calls it."""
    return f"CKR_{NAMES[code]}" if code in NAMES else f"CKR {code:#x}"


main()
