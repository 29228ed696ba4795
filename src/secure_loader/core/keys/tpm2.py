"""``tpm2:``: master keys sealed to the TPM 2.0 of this machine, and to the values of its PCRs if so wished.

A TPM seals 128 bytes and binds them to nothing else. So it seals a key of its own for each entry, released under the
storage root key (SRK) and a policy, and that key wraps the master key with AES-256-GCM and the entry's context.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ...errors import KeyAccessError, KeySourceDeniedError, KeySourceResponseError, KeySourceUnreachableError
from ..recipient import Recipient, WrapContext
from ..secrets import Secret, wipe
from . import tpm2_wire as wire
from .jwk import MasterKey
from .net import Deadline
from .provider import KeyRequest
from .tpm2_wire import Object, Reader, Session, Tpm, TpmError, sized
from .wrapping import WrappingProvider

# tpm2-tools' own; without it they would try a simulator on this machine's ports in the end, which may be anybody.
TCTI_VARIABLE = "TPM2TOOLS_TCTI"
DEFAULT_TCTI = "device:/dev/tpmrm0"
_HINT = "tpm2:, tpm2:pcrs=sha256:7+11, or with ;srk=0x81000001 for an SRK that was made persistent"
_BANKS = {"sha256": 0x0B, "sha384": 0x0C, "sha512": 0x0D}
_PART = re.compile(r"srk=(0x81[0-9a-f]{6})|pcrs=(sha256|sha384|sha512):((?:0|[1-9]\d?)(?:\+(?:0|[1-9]\d?))*)")
_KID = re.compile(r"([0-9a-f]{68})(?:;(pcrs=.*))?")
_MAX_PCR = 23
_NONCE, _TAG, _KEK = 12, 16, 32

_T = TypeVar("_T")

_deadline: ContextVar[Deadline | None] = ContextVar("secure_loader_tpm2_deadline", default=None)

# The SRK of the TCG's provisioning guidance, on P-256: what tpm2_createprimary makes of
# `-C o -G ecc256:aes128cfb -a 'fixedtpm|fixedparent|sensitivedataorigin|userwithauth|noda|restricted|decrypt'`.
_PARENT = wire.FIXED_TPM | wire.FIXED_PARENT | wire.RESTRICTED | wire.DECRYPT
_SRK = struct.pack(
    ">HHIHHHHHHHHH",
    wire.ECC, wire.SHA256, _PARENT | wire.ORIGIN | wire.USER_AUTH | wire.NO_DA,
    0, wire.AES, 128, wire.CFB, wire.NULL, wire.P256, wire.NULL, 0, 0,
)  # fmt: skip

# What becomes of a refusal: response codes of part 2, without the numbers in them.
_DENIED = {
    0x9D: "the PCRs are not what they were when the key was sealed",
    0x128: "the PCRs are changing",
    0x9F: "the sealed key was altered, or is another TPM's",
    0x12F: "the sealed key was altered, or is another TPM's",
    0x8E: "the TPM asks for a password",
    0xA2: "the TPM asks for a password",
    0x921: "the TPM is locked, after too many wrong passwords",
    0x120: "the owner's hierarchy is switched off",
    0x85: "the owner's hierarchy is switched off",
}
_LOCKED_UP = (
    "the owner's hierarchy, or the SRK, has a password: have an SRK without one made persistent, and say ;srk=0x81…"
)
_HINTS = {0x9D: "boot what was booted then, or seal it anew: rewrap -r tpm2:…", 0x8E: _LOCKED_UP, 0xA2: _LOCKED_UP}
# INITIALIZE, FAILURE, out of memory and of sessions.
_OUT_OF_ORDER = (0x100, 0x101, 0x902, 0x903, 0x904, 0x905, 0x906)
_NO_OBJECT = 0x8B


@dataclass(frozen=True, slots=True)
class Options:
    """What a reference says.

    Attributes:
        srk: Handle of a persistent SRK, or None.
        bank: Digest of the PCRs, or None.
        pcrs: Which PCRs, in order.
    """

    srk: int | None
    bank: str | None
    pcrs: tuple[int, ...]

    @property
    def selection(self) -> str:
        """Bank and PCRs, always in the same spelling; empty for none."""
        return f"pcrs={self.bank}:{'+'.join(map(str, self.pcrs))}" if self.bank else ""

    def marshalled(self) -> bytes:
        """TPML_PCR_SELECTION."""
        return struct.pack(">IHB", 1, _BANKS[self.bank or ""], 3) + wire.bitmap(self.pcrs)


class Tpm2Provider(WrappingProvider):
    """The TPM of this machine."""

    alg = "tpm2"

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[int | None, str] = {}

    def fetch(self, reference: str, request: KeyRequest) -> MasterKey | None:
        """See :meth:`WrappingProvider.fetch`. Asking for the SRK's name and unsealing share a deadline."""
        with self._in_time():
            return super().fetch(reference, request)

    def wrap(self, reference: str, master: Secret, context: WrapContext) -> Recipient:
        """See :meth:`WrappingProvider.wrap`; likewise."""
        with self._in_time():
            return super().wrap(reference, master, context)

    @contextlib.contextmanager
    def _in_time(self) -> Iterator[None]:
        token = _deadline.set(Deadline(self.seconds))
        try:
            yield
        finally:
            _deadline.reset(token)

    def kid(self, reference: str) -> str:
        """See :meth:`WrappingProvider.kid`: the SRK's name, in hex, and the PCRs."""
        options = parse_options(reference)
        return ";".join(filter(None, (self._srk_name(options), options.selection)))

    def opens(self, reference: str, entry: Recipient) -> bool:
        """See :meth:`WrappingProvider.opens`: which PCRs it is, the entry says, unless the reference does."""
        options, kid = parse_options(reference), _KID.fullmatch(entry.kid)
        if kid is None or (options.bank and options.selection != kid[2]):
            return False
        return kid[1] == self._srk_name(options)

    def wrap_key(self, reference: str, master: Secret, context: WrapContext) -> bytes:
        """See :meth:`WrappingProvider.wrap_key`: selection of PCRs, public and private part, nonce, ciphertext, tag."""
        options, nonce = parse_options(reference), os.urandom(_NONCE)
        with Secret(bytearray(os.urandom(_KEK))) as kek:
            sealed = self._ask(options, lambda tpm, srk: _seal(tpm, srk, options, kek))
            return sealed + nonce + AESGCM(kek.reveal()).encrypt(nonce, master.reveal(), context.encode())

    def unwrap_key(self, reference: str, wrapped: bytes, context: WrapContext) -> Secret:
        """See :meth:`WrappingProvider.unwrap_key`."""
        sealed = parse_sealed(wrapped)
        options = parse_options(reference)
        with self._ask(options, lambda tpm, srk: _unseal(tpm, srk, sealed), unsealing=True) as kek:
            if len(kek) != _KEK:
                raise _altered()
            out = bytearray(len(sealed.wrapped) - _TAG)
            try:
                AESGCM(kek.reveal()).decrypt_into(sealed.nonce, sealed.wrapped, context.encode(), out)
            except InvalidTag:
                wipe(out)
                raise KeySourceDeniedError(
                    "key source tpm2: what was sealed does not open it: it was wrapped for another model, or altered"
                ) from None
            return Secret(out)

    def _srk_name(self, options: Options) -> str:
        if options.srk not in self._names:
            self._ask(options, lambda _, __: None)
        return self._names[options.srk]

    def _ask(self, options: Options, do: Callable[[Tpm, Object], _T], *, unsealing: bool = False) -> _T:
        """Have something done with the SRK: always the one that it was before."""
        try:
            deadline = _deadline.get() or Deadline(self.seconds)
            with Tpm(os.environ.get(TCTI_VARIABLE) or DEFAULT_TCTI, deadline) as tpm:
                srk = _srk(tpm, options)
                if self._names.setdefault(options.srk, srk.name.hex()) != srk.name.hex():
                    raise KeySourceResponseError("key source tpm2: the TPM shows another storage root key than before")
                return do(tpm, srk)
        except TpmError as e:
            raise _refusal(e, unsealing=unsealing) from None
        except ValueError:
            raise KeySourceResponseError("key source tpm2: the TPM answers what no TPM 2.0 does") from None


@dataclass(frozen=True, slots=True)
class Sealed:
    """An entry, in parts.

    Attributes:
        selection: PCRs, as TPML_PCR_SELECTION.
        public: Of the sealed key: TPM2B_PUBLIC.
        private: Likewise, TPM2B_PRIVATE: only its TPM can read it.
        nonce: Of the wrapped key.
        wrapped: Ciphertext and tag.
    """

    selection: bytes
    public: bytes
    private: bytes
    nonce: bytes
    wrapped: bytes


def parse_sealed(data: bytes) -> Sealed:
    """An entry, taken apart.

    Raises:
        KeySourceDeniedError: It is none.
    """
    reader = Reader(data)
    try:
        count = reader.number(4)
        if count > 1:
            raise ValueError
        selection = struct.pack(">I", count) + bytes(reader.take(6 * count))
        public, private = bytes(sized(reader.sized())), bytes(sized(reader.sized()))
        nonce, wrapped = bytes(reader.take(_NONCE)), bytes(reader.rest())
        if len(wrapped) < _TAG:
            raise ValueError
    except ValueError:
        raise _altered() from None
    return Sealed(selection, public, private, nonce, wrapped)


def parse_options(reference: str) -> Options:
    """What stands behind ``tpm2:``.

    Raises:
        KeyAccessError: Something else.
    """
    srk: int | None = None
    bank: str | None = None
    pcrs: set[int] = set()
    for part in reference.split(";") if reference else ():
        found = _PART.fullmatch(part)
        if found is None or (srk if found[1] else bank) is not None:
            raise KeyAccessError("a tpm2: reference is not understood", hint=_HINT)
        if found[1]:
            srk = int(found[1], 16)
        else:
            bank, pcrs = found[2], {int(n) for n in found[3].split("+")}
    if any(n > _MAX_PCR for n in pcrs):
        raise KeyAccessError(f"a tpm2: reference names a PCR above {_MAX_PCR}", hint=_HINT)
    return Options(srk, bank, tuple(sorted(pcrs)))


def _srk(tpm: Tpm, options: Options) -> Object:
    if options.srk is None:
        return tpm.create_primary(_SRK)
    found = tpm.read_public(options.srk)
    # Whatever is below such a key cannot leave its TPM.
    if int.from_bytes(found.public[4:8], "big") & _PARENT != _PARENT:
        raise KeyAccessError(f"key source tpm2: the key at {options.srk:#x} is no storage key that stays in its TPM")
    return found


def _seal(tpm: Tpm, srk: Object, options: Options, kek: Secret) -> bytes:
    """Selection, public and private part of a new object that holds the key."""
    selection, policy = struct.pack(">I", 0), b""
    flags = wire.FIXED_TPM | wire.FIXED_PARENT | wire.NO_DA
    if options.bank:
        selection = options.marshalled()
        # A TPM leaves PCRs out that it does not have: the key would be bound to nothing.
        if not tpm.has_pcrs(_BANKS[options.bank], options.pcrs):
            raise KeyAccessError(f"key source tpm2: the TPM has no such PCRs ({options.selection})", hint=_HINT)
        trial = Session(tpm, srk, wire.TRIAL)
        tpm.do("PolicyPCR", [trial.handle], bytes(2) + selection)
        policy = bytes(tpm.do("PolicyGetDigest", [trial.handle]).sized())
    else:
        flags |= wire.USER_AUTH
    public = struct.pack(">HHI", wire.KEYED_HASH, wire.SHA256, flags) + sized(policy) + struct.pack(">HH", wire.NULL, 0)
    # No outside information, no PCRs of the moment.
    rest = sized(public) + bytes(2) + bytes(4)
    parameters = bytearray(6 + len(kek) + len(rest))
    # An empty authorisation value, and the key. Filled in place: a buffer that grows leaves copies behind.
    struct.pack_into(">HHH", parameters, 0, 4 + len(kek), 0, len(kek))
    parameters[6 : 6 + len(kek)] = kek.reveal()
    parameters[6 + len(kek) :] = rest
    answer = Session(tpm, srk, wire.HMAC).do("Create", srk, parameters, seal=True, open_=True)
    private, public = answer.sized(), bytes(answer.sized())
    return selection + bytes(sized(public) + sized(private))


def _unseal(tpm: Tpm, srk: Object, sealed: Sealed) -> Secret:
    session = Session(tpm, srk, wire.HMAC)
    handle = session.loaded("Load", srk, bytearray(sealed.private + sealed.public))
    if int.from_bytes(sealed.selection[:4], "big"):
        session = Session(tpm, srk, wire.POLICY)
        tpm.do("PolicyPCR", [session.handle], bytes(2) + sealed.selection)
    answer = session.do("Unseal", Object(handle, sealed.public[2:]), bytearray(), seal=False, open_=True)
    found = answer.sized()
    try:
        return Secret(bytearray(found))
    finally:
        wipe(found)


def _altered() -> KeySourceDeniedError:
    return KeySourceDeniedError(f"key source tpm2: {_DENIED[0x9F]}")


def _refusal(error: TpmError, *, unsealing: bool) -> KeyAccessError:
    if error.code in _DENIED:
        return KeySourceDeniedError(f"key source tpm2: {_DENIED[error.code]} ({error})", hint=_HINTS.get(error.code))
    if error.command == "ReadPublic" and error.code == _NO_OBJECT:
        return KeySourceResponseError("key source tpm2: there is no key at that handle")
    if error.code in _OUT_OF_ORDER:
        return KeySourceUnreachableError(f"key source tpm2: {error}")
    # What was sealed is loaded from the entry: an altered one may be refused for many reasons.
    return _altered() if unsealing else KeySourceResponseError(f"key source tpm2: {error}")
