"""What is wrapped for an identity: our reader and the naive one take the same bytes, and for the same key."""

from __future__ import annotations

from collections.abc import Callable

from secure_loader.core.keys.hybrid import ALG, Identity
from secure_loader.core.recipient import Recipient, WrapContext
from secure_loader.core.secrets import Secret
from secure_loader.errors import FormatError, KeyAccessError
from tests.fuzz.claims import check
from tests.vectors import DATA, iter_vectors, naive, naive_hpke, naive_json, read_jwks

_SEED = naive.key_bytes(read_jwks(DATA / "keys" / "identity.json")[0]["priv"])
_CONTEXT = WrapContext("m-aes256", "aes256gcm", "acme/tiny")


def one_recipient(data: bytes) -> None:
    """The input is the wrapped key of an entry."""
    try:
        entry = Recipient(ALG, "r-bob", data)
    except FormatError:
        check(not 1 <= len(data) <= 8192, "an entry within the bounds was refused")
        return
    try:
        with Identity("r-bob", Secret(_SEED)).unwrap(entry, _CONTEXT) as secret:
            found = bytes(secret.reveal())
    except KeyAccessError:
        found = None
    try:
        theirs = naive_hpke.open_wrapped(_SEED, data, _CONTEXT.encode())
    except naive_json.KeyAccessError:
        theirs = None
    check(found == theirs, "two readers unwrap different keys")


def seeds() -> dict[str, list[bytes]]:
    """Whatever the vectors have in their lists."""
    found = []
    for vector in iter_vectors():
        if vector.name.startswith("recipients-") and vector.expect != "FormatError":
            profile = naive_json.strict_json(naive.File(vector.data).meta["__secure_loader__"])
            found += [naive_json.unb64(entry["wrapped"], "wrapped") for entry in profile.get("recipients", [])]
    return {"fuzz_recipients": found}


TARGETS: dict[str, Callable[[bytes], None]] = {"fuzz_recipients": one_recipient}
