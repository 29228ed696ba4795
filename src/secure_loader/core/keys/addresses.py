"""Which network addresses belong to the internet."""

from __future__ import annotations

import ipaddress

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
# What Python, or an older one, takes for public: what answers every machine of Azure from inside, addresses of
# protocols (Oracle's cloud answered there), those once meant for one site, NAT64 of one network (RFC 8215),
# documentation (RFC 9637), segments of one network (RFC 9602), and a dummy (RFC 9780).
_INSIDE = tuple(
    ipaddress.ip_network(text)
    for text in (
        "168.63.129.16/32",
        "192.0.0.0/24",
        "fec0::/10",
        "64:ff9b:1::/48",
        "3fff::/20",
        "5f00::/16",
        "100:0:0:1::/64",
    )
)
# IPv6 networks whose last 32 bits are an IPv4 address: NAT64, and "compatible" addresses.
_EMBEDDING = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("::/96"))


def is_public(address: Address) -> bool:
    """Whether an address belongs to the internet: not to this machine, a private network, or a cloud's inside."""
    if isinstance(address, ipaddress.IPv6Address):
        inside = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if any(address in network for network in _EMBEDDING):
            inside.append(ipaddress.IPv4Address(address.packed[12:]))
        embedded = [a for a in inside if a is not None]
        if embedded:
            return all(map(is_public, embedded))
    odd = address.is_multicast or address.is_reserved or any(address in network for network in _INSIDE)
    return address.is_global and not odd
