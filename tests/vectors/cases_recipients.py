"""Recipients (B.5): master keys wrapped for identities, which are all that most of these readers have."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .casebook import BOB, IMPOSTER_BOB, KEYS, MASTER, MASTERS, TINY, Case, flip, tiny
from .naive_json import b64, compact, unb64
from .naive_writer import Draft, assemble, make_master, wrap_for

IDENTITY = "keys/identity.json"
FORMAT, KEY, SIGNATURE = "FormatError", "KeyAccessError", "SignatureError"
MODEL = "acme/tiny"


def recipients() -> Iterator[Case]:
    yield from good()
    yield from lists()
    yield from members()
    yield from wrapped()
    yield from changed()


def entry(kid: str = "r-bob", alg: str = "mlkem768-x25519", data: bytes = b"for another one!") -> dict:
    return {"alg": alg, "kid": kid, "wrapped": b64(data)}


def bob(
    master: dict = MASTER, *, who: dict = BOB, kid: str | None = None, alg: str | None = None, model: str = MODEL
) -> dict:
    """Bob's entry; ``kid``, ``alg`` and ``model`` are those of the context."""
    context = {"alg": alg or master["alg"], "kid": kid or master["kid"], "model_id": model}
    return entry(data=wrap_for(who, master, context))


def draft_with(name: str, value, **options) -> Draft:
    draft = tiny(f"recipients-{name}", **options)
    draft.profile["recipients"] = value
    return draft


def case(name: str, expect: str, comment: str, value, attacks: str = "", keys: str = IDENTITY, **options) -> Case:
    draft = draft_with(name, value, **options)
    found = {"tensors": TINY, "cryptotensors": "other-keys"} if expect == "success" else {}
    return Case(f"recipients-{name}", expect, comment, draft.file(), keys=keys, attacks=attacks, **found)


def good() -> Iterator[Case]:
    for alg, master in MASTERS.items():
        yield case(f"ok-{alg}", "success", f"an identity is all the reader has, {alg}", [bob(master)], master=master)
    yield case("ok-v1", "success", "an identity is all the reader has, version 1", [bob()], version="1")
    others = [entry("arn:aws:kms:eu-central-1:1:key/2", "aws-kms"), bob(), entry("r-carol"), entry("r-bob", "x")]
    yield case("ok-others", "success", "other recipients, and an alg that nobody knows, beside", others)
    limits = [entry("k" * 512, "a" * 32, bytes(8192)), entry("\U0001f511" * 512, "a" * 32, b"\0"), bob()]
    yield case("ok-limits", "success", "an alg of 32, kids of 512 characters, 8,192 wrapped bytes and one", limits)
    many = sorted([entry(f"r-{i:02}", data=b"w") for i in range(63)] + [bob()], key=lambda e: e["kid"])
    yield case("ok-64", "success", "64 recipients", many)
    for name, keys in (("master", KEYS), ("both", f"{KEYS} {IDENTITY}")):
        made = case(f"ok-{name}", "success", "the reader has the master key as well", [bob()], keys=keys)
        made.cryptotensors = ""
        yield made


def lists() -> Iterator[Case]:
    two = [entry("r-ann"), entry()]
    yield case("empty", FORMAT, "an empty list", [], "a40")
    yield case("object", FORMAT, "an object in place of the list", {"r-bob": entry()}, "a40")
    yield case("null", FORMAT, "null in place of the list", None, "a40")
    yield case("text", FORMAT, "a string in place of an entry", ["r-bob"], "a40")
    yield case("unsorted-kid", FORMAT, "not sorted by kid", two[::-1], "a12")
    yield case("unsorted-alg", FORMAT, "not sorted by alg", [entry(alg="x"), entry()], "a12")
    yield case("twice", FORMAT, "an entry twice", [entry(), entry()], "a04")
    yield case("twice-otherwise", FORMAT, "two entries for one recipient", [entry(data=b"1"), entry(data=b"2")], "a04")
    many = sorted([entry(f"r-{i:02}", data=b"w") for i in range(64)] + [entry()], key=lambda e: e["kid"])
    yield case("65", FORMAT, "65 recipients", many, "a17")


def members() -> Iterator[Case]:
    for name, value in {"alg": None, "kid": None, "wrapped": None}.items():
        rest = {k: v for k, v in entry().items() if k != name}
        yield case(f"no-{name}", FORMAT, f"an entry without {name}", [rest], "a40")
        yield case(f"{name}-null", FORMAT, f"{name} is null", [entry() | {name: value}], "a40")
        yield case(f"{name}-number", FORMAT, f"{name} is a number", [entry() | {name: 5}], "a40")
    yield case(
        "unknown-member", FORMAT, "an unknown member of an entry", [entry() | {"url": "https://keys.invalid"}], "a13"
    )
    for label, alg in {
        "capital": "MLKEM768-X25519",
        "empty": "",
        "long": "a" * 33,
        "dash": "-a",
        "underscore": "a_b",
        "space": "a ",
        "newline": "aws-kms\n",
        "umlaut": "\u00fc",
    }.items():
        yield case(f"alg-{label}", FORMAT, f"an alg that is none: {label}", [entry(alg=alg)], "a27")
    for label, kid in {
        "empty": "",
        "long": "k" * 513,
        "control": "r\tbob",
        "del": "r-bob\x7f",
        "nul": "r-bob\0",
    }.items():
        yield case(f"kid-{label}", FORMAT, f"a kid that is none: {label}", [entry(kid)], "a28")
    for label, change in {
        "0": lambda _: "",
        "8193": lambda _: b64(bytes(8193)),
        "not-base64": lambda text: "*" + text[1:],
        "spaced": lambda text: text[:4] + " " + text[4:],
        "newline": lambda text: text + "\n",
        "unpadded": lambda text: text.rstrip("="),
        "bits": lambda text: b64(bytes(4))[:5] + "B==",
        "url-alphabet": lambda _: "-_-_",
    }.items():
        spoilt = entry() | {"wrapped": change(entry()["wrapped"])}
        yield case(f"wrapped-{label}", FORMAT, f"wrapped: {label}", [spoilt], "a40")


def wrapped() -> Iterator[Case]:
    """Entries that are well-formed, signed, and do not open, or open to something else."""
    yield case("stranger", KEY, "nobody of the list has the key that the reader has", [entry("r-carol")], "a35")
    yield case("other-alg", KEY, "an entry for a key of that name, by another alg", [bob() | {"alg": "x"}], "a27")
    yield case("other-model", KEY, "an entry of another model", [bob(model="acme/other")], "a90")
    yield case("other-kid", KEY, "an entry of another master key's name", [bob(kid="m-other")], "a90")
    yield case("other-algorithm", KEY, "an entry of another algorithm", [bob(alg="chacha20poly1305")], "a90")
    yield case("other-key", KEY, "an entry for another key of that name", [bob(who=IMPOSTER_BOB)], "a90")
    yield case(
        "imposter", KEY, "the reader has another key of that name", [bob()], "a35", keys="keys/identity-imposter.json"
    )
    both = f"{IDENTITY} keys/identity-imposter.json"
    yield case("two-identities", KEY, "the reader has two different keys of that name", [bob()], "a28", keys=both)
    wrong = make_master("aes256gcm", "m-not-this-one") | {"kid": MASTER["kid"]}
    yield case("other-master", KEY, "another master key is wrapped: kcv differs", [bob(wrong)], "a35")
    short = MASTERS["aes128gcm"] | {"kid": MASTER["kid"], "alg": "aes256gcm"}
    yield case("short-master", KEY, "16 bytes are wrapped in place of 32", [bob(short)], "a27")
    good = unb64(bob()["wrapped"], "wrapped")
    for label, data in {
        "first": flip(good, 0),
        "point": flip(good, 1119),
        "ciphertext": flip(good, 1120),
        "tag": flip(good, -1),
        "cut": good[:-1],
        "longer": good + b"\0",
        "kem-only": good[:1120],
        "one-byte": b"\0",
    }.items():
        yield case(f"altered-{label}", KEY, f"wrapped for Bob, signed, altered: {label}", [entry(data=data)], "a39")
    keys = "keys/masters-wrong.json keys/identity.json"
    comment = "a master key of that name that is another one is not passed over"
    yield case("wrong-master-too", KEY, comment, [bob()], "a35", keys=keys)


def changed() -> Iterator[Case]:
    """After signing."""
    for label, change in {
        "added": lambda found: [*found, entry("r-eve")],
        "removed": lambda found: found[:1],
        "exchanged": lambda found: [found[0] | {"wrapped": found[1]["wrapped"]}, found[1]],
        "renamed": lambda found: [found[0], found[1] | {"kid": "r-eve"}],
    }.items():
        yield after(f"{label}-unsigned", f"a recipient {label} after signing", change)
    yield after("all-removed-unsigned", "the list removed after signing", lambda _: None)
    draft = draft_with("order", [bob()])
    meta = draft.metadata()
    shown = meta["__secure_loader__"]
    mixed = shown.replace('"alg":"mlkem768-x25519","kid":"r-bob"', '"kid":"r-bob","alg":"mlkem768-x25519"')
    data = draft.file(meta | {"__secure_loader__": mixed})
    yield Case("recipients-members-unsorted", SIGNATURE, "members of an entry in another order", data, attacks="a12")
    text = shown.replace('"kid":"r-bob"', '"kid":"r-bob","kid":"r-bob"')
    data = draft.file(meta | {"__secure_loader__": text})
    yield Case("recipients-member-twice", FORMAT, "a member of an entry twice", data, attacks="a04")


def after(name: str, comment: str, change: Callable[[list], list | None]) -> Case:
    draft = draft_with("changed", [entry("r-ann"), bob()])
    old = draft.signed()
    draft.profile["recipients"] = change(draft.profile["recipients"])
    if draft.profile["recipients"] is None:
        del draft.profile["recipients"]
    meta = dict(sorted((draft.metadata() | {"__signature__": old["__signature__"]}).items()))
    data = assemble(compact({"__metadata__": meta} | draft.entries).encode(), bytes(draft.body))
    return Case(f"recipients-{name}", SIGNATURE, comment, data, keys=IDENTITY, attacks="a95")
