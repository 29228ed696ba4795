"""Opening a model folder: whom to trust, what a policy says, and keys from wherever they are, to the first tensor of each shard.

The other side is safetensors, with the plain folder; where a service is asked, after a request of the same kind by
``http.client``, which stands for what the network takes. Everything is measured in a process that has loaded a model
before, from the same service where there is one, and in one that has loaded none.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import data
from benchmarks.data import OPENING, TINY_OPENING, Model
from benchmarks.key_sources import Place, Request, Sources, sources
from benchmarks.loaders import ready
from benchmarks.model import OURS, Case, Entry, Goal, Quantity, Size, Suite
from secure_loader.bench.measure import MeasurementError, Task, digest

_MODULES = (
    "torch",
    "safetensors.torch",
    "secure_loader.core.archive",
    "secure_loader.core.checkpoint",
    "secure_loader.core.keys.hybrid",
    "secure_loader.core.keys.kbs",
    "secure_loader.core.keys.transit",
    "secure_loader.core.keys.vault",
    "secure_loader.core.keys.https",
    "subprocess",
)
# Entry: which process has it (benchmarks.key_sources), and what readers see.
_LOCAL = {
    "file": ("local", "key file"),
    "folder": ("local", "folder of 20 key files"),
    "identity": ("local", "identity (ML-KEM-768 + X25519)"),
    "trust": ("local", "key file, 5 trust rules, 20 revocations"),
    "trust-long": ("local", "key file, 5 trust rules, 500 revocations"),
    "rego": ("policy", "key file, Rego policy"),
    "rego-each": ("policy", "key file, Rego policy about each shard"),
}
_REMOTE = {
    "https": ("https", "https:, pinned authority"),
    "roots-folder": ("https", "https:, the system's folder of roots"),
    "roots-file": ("https", "https:, the system's file of roots"),
    "vault": ("openbao", "vault: (OpenBao, KV)"),
    "transit": ("openbao", "transit: (OpenBao)"),
    "kbs": ("kbs", 'kbs:, kbs_mode = "token"'),
}
# Services with a request of their own to compare with.
_ASKED = {
    "https": "GET over https",
    "vault": "GET from OpenBao (KV)",
    "transit": "POST to OpenBao (transit)",
    "kbs": "GET from the broker",
}
_BARE = {"roots-folder": "https", "roots-file": "https"}
_TITLES = {"next": "4 shards, 300 tensors", "first": "4 shards, 300 tensors, the first model of a process"}
_SETTINGS = ("SECURE_LOADER_", "VAULT_", "BAO_", "SSL_CERT_")


# --- what is measured ---------------------------------------------------------------------------------------------


def _become(place: Place) -> None:
    """Be somebody who opens models there, and nobody else."""
    for name in [name for name in os.environ if name.startswith(_SETTINGS)]:
        del os.environ[name]
    os.environ.update(place.environment)


def _headers(place: Place) -> list[Any]:
    """All shards, verified; no key was asked for."""
    from secure_loader import Archive, Session
    from secure_loader.core.checkpoint import Checkpoint

    checkpoint = Checkpoint(place.folder, Session())
    return [Archive(checkpoint.open(shard), "pt") for shard in checkpoint.shards()]


def _plain_headers(files: list[Path]) -> list[Any]:
    from safetensors import safe_open

    return [safe_open(file, "pt") for file in files]


def _first_tensors(shards: list[Any]) -> dict[str, Any]:
    """One tensor of each; ours has the keys of all others then."""
    return {name: shard.get_tensor(name) for shard in shards for name in shard.offset_keys()[:1]}


def _all_tensors(shards: list[Any]) -> None:
    """What a load before leaves behind: threads, memory, and what libraries make when they are first used."""
    for shard in shards:
        for name in shard.offset_keys():
            shard.get_tensor(name)


def _asking(request: Request) -> Callable[[], None]:
    """A function that asks. What is made once for all requests, the TLS context with its roots, is made here."""
    import http.client
    import ssl

    context = ssl.create_default_context(cafile=request.authority)
    headers = {**request.headers, "Connection": "close"}

    def ask() -> None:
        connection = http.client.HTTPSConnection("localhost", request.port, context=context, timeout=10)
        try:
            connection.request(request.method, request.path, request.body, headers)
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                raise MeasurementError(f"the bare request was answered with {answer.status}")
        finally:
            connection.close()

    return ask


def _checked(found: dict[str, Any], source: Sources | None, before: int) -> dict[str, Any]:
    """Digest of the tensors, and how many requests the service has seen, which is one."""
    requests = 0 if source is None else source.requests() - before
    if source is not None and requests != 1:
        raise MeasurementError(f"the service has seen {requests} requests for one model, not 1")
    return {"digest": digest(found), "requests": requests}


# --- entries ------------------------------------------------------------------------------------------------------


def _task(
    name: str,
    headers: Callable[[], list[Any]],
    files: list[Path],
    *,
    before: Callable[[], object] | None,
    place: Place | None = None,
    service: Sources | None = None,
    request: Request | None = None,
) -> Task:
    """One way of opening.

    Args:
        name: The entry's.
        headers: Opens all shards.
        files: What it reads.
        before: Loads a model that is not measured.
        place: Who opens it.
        service: Whose requests are counted.
        request: What it is asked by ``http.client`` first.
    """
    asks: list[Callable[[], None]] = []
    seen: list[int] = []

    def prepare() -> None:
        ready()
        if request is not None:
            asks.append(_asking(request))
        if before is not None:
            before()
            for ask in asks:
                ask()
        if place is not None:
            _become(place)
        if service is not None:
            seen.append(service.requests())

    def open_headers(_: Any) -> list[Any]:
        for ask in asks:
            ask()
        return headers()

    return Task(
        name=name,
        prepare=prepare,
        phases={"headers": open_headers, "open": _first_tensors},
        check=lambda found: _checked(found, service, *(seen or [0])),
        files=files,
    )


def _secure(what: Model, name: str, label: str, *, first: bool, asked: str | None = None) -> Entry:
    kind = (_LOCAL | _REMOTE)[name][0]

    def make() -> Task:
        plain = data.path(what, "plain")
        places = sources(kind, plain).places
        if name not in places:
            raise MeasurementError("this system has no such roots")
        place, service = places[name], None if asked is None else sources(_REMOTE[asked][0], plain)
        # A decision about a policy would be remembered.
        earlier = place if name in _REMOTE else sources("local", plain).places["file"]

        def before() -> None:
            _become(earlier)
            _all_tensors(_headers(earlier))

        return _task(
            name if asked is None else f"{name}-{asked}",
            lambda: _headers(place),
            sorted(path for path in Path(place.folder).iterdir() if path.is_file()),
            before=None if first else before,
            place=place,
            service=sources(kind, plain) if name in _REMOTE else service,
            request=None if service is None else service.places[str(asked)].request,
        )

    return _entry(what, name if asked is None else f"{name}-{asked}", label, OURS, make)


def _safetensors(what: Model, name: str, label: str, *, first: bool, asked: str | None = None) -> Entry:
    def make() -> Task:
        plain, files = data.path(what, "plain"), data.weight_files(what, "plain")
        service = None if asked is None else sources(_REMOTE[asked][0], plain)
        return _task(
            name,
            lambda: _plain_headers(files),
            files,
            before=None if first else lambda: _all_tensors(_plain_headers(files)),
            service=service,
            request=None if service is None else service.places[str(asked)].request,
        )

    return _entry(what, name, label, "safetensors", make)


def _entry(what: Model, name: str, label: str, loader: str, make: Callable[[], Task]) -> Entry:
    return Entry(
        name=name,
        label=label,
        loader=loader,
        make=make,
        modules=_MODULES,
        data=((what, "plain"),),
        parameters={"bytes": what.nbytes, "tensors": int(what.kind.rpartition("-")[2])},
    )


def _cases(size: Size) -> tuple[Case, ...]:
    what = OPENING if size == "full" else TINY_OPENING
    cases = []
    for case, title in _TITLES.items():
        first = case == "first"
        entries = [_safetensors(what, "plain", "safetensors, plain", first=first)]
        entries += [_secure(what, name, label, first=first) for name, (_, label) in _LOCAL.items()]
        for name, (_, label) in _REMOTE.items():
            entries.append(_secure(what, name, label, first=first))
            if name in _ASKED:
                bare = f"after a bare {_ASKED[name]}"
                entries.append(
                    _safetensors(what, f"plain-{name}", f"safetensors, plain, {bare}", first=first, asked=name)
                )
            if name in _ASKED and not first:
                entries.append(_secure(what, "file", f"key file, {bare}", first=first, asked=name))
        cases.append(Case(name=case, title=title, entries=tuple(entries), reference="plain"))
    return tuple(cases)


# --- goals --------------------------------------------------------------------------------------------------------


def _goal(name: str, bound: float | None, *, case: str = "next", more: str = "") -> Goal:
    label = (_LOCAL | _REMOTE)[name][1]
    bare = _BARE.get(name, name)
    return Goal(
        what=f"opening a folder of 4 shards: {label}{more}",
        against="safetensors" if name in _LOCAL else f"safetensors, and a bare {_ASKED[bare]}",
        measured=Quantity(case, name, "seconds.open", scale=1e3),
        reference=Quantity(case, "plain" if name in _LOCAL else f"plain-{bare}", "seconds.open", scale=1e3),
        compare="difference",
        bound=bound,
        unit=" ms",
    )


def _asked(name: str) -> tuple[Goal, Goal]:
    """Of a service: what asking it costs instead of reading a key file, and how often it was asked."""
    label = _REMOTE[name][1]
    return (
        Goal(
            what=f"of that, for asking: {label}",
            against=f"key file, and a bare {_ASKED[name]}",
            measured=Quantity("next", name, "seconds.open", scale=1e3),
            reference=Quantity("next", f"file-{name}", "seconds.open", scale=1e3),
            compare="difference",
            bound=None,
            unit=" ms",
        ),
        Goal(
            what=f"requests for 4 shards, 300 tensors: {label}",
            against="what the service has seen",
            measured=Quantity("next", name, "check.requests"),
            compare="value",
            bound=1.0,
        ),
    )


_BOUNDS: dict[str, float | None] = {name: 150.0 if name.startswith("rego") else 10.0 for name in (*_LOCAL, *_REMOTE)}
_BOUNDS |= {"trust-long": None, "rego-each": None}

SUITE = Suite(
    name="keys",
    title="Opening a model: keys, trust, policy",
    cases=_cases,
    goals=(
        *(_goal(name, bound) for name, bound in _BOUNDS.items()),
        *(goal for name in _ASKED for goal in _asked(name)),
        *(_goal(name, None, case="first", more=", the first model of a process") for name in ("file", "rego", "vault")),
    ),
)
