"""One TCP endpoint as a typed (host, port) pair: parsed once, printed in one canonical form.

It knows the spellings of IPv4, IPv6 with and without brackets, zone ids and host names, and refuses
what could be read in two ways. It resolves nothing.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Self

from ..errors import UsageError

PORT_MAX = 65_535
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)\Z")
_ZONE = re.compile(r"[A-Za-z0-9_.:@-]{1,15}\Z")  # an interface name or index (IFNAMSIZ - 1)
_HINT = "write host:port, 192.0.2.1:port or [2001:db8::1]:port"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`host` is canonical: a lower-case name, an IPv4 or IPv6 literal (no brackets, zone kept)."""

    host: str
    port: int

    def __post_init__(self) -> None:
        if type(self.port) is not int or not 0 <= self.port <= PORT_MAX:
            raise UsageError(f"port {self.port!r} is not between 0 and {PORT_MAX}", hint=_HINT)
        object.__setattr__(self, "host", _canonical_host(self.host))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def pair(self) -> tuple[str, int]:
        """As `getaddrinfo` and asyncio take it."""
        return self.host, self.port

    @property
    def is_wildcard(self) -> bool:
        """Good to listen on, senseless to dial."""
        literal = _literal(self.host)
        return literal is not None and literal.is_unspecified

    @property
    def is_loopback(self) -> bool:
        """Reachable from this host alone."""
        literal = _literal(self.host)
        return self.host == "localhost" if literal is None else literal.is_loopback

    @classmethod
    def parse(cls, text: str, default_port: int | None = None) -> Self:
        """host:port, [v6]:port, or a host alone when there is a default port. Raises UsageError."""
        host, port = _split(text)
        if port is None:
            if default_port is None:
                raise UsageError(f"endpoint {text!r} has no port", hint=_HINT)
            return cls(host, default_port)
        if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= PORT_MAX):
            raise UsageError(
                f"endpoint {text!r}: {port[:20]!r} is not a port between 0 and {PORT_MAX}",
                hint=_HINT,
            )
        try:
            return cls(host, int(port))
        except UsageError as error:
            raise UsageError(f"endpoint {text!r}: {error}", hint=_HINT) from error


def _split(text: str) -> tuple[str, str | None]:
    if not text or text != text.strip():
        raise UsageError(f"endpoint {text!r} is empty or has spaces around it", hint=_HINT)
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")) or ":" not in host:
            raise UsageError(f"endpoint {text!r}: brackets go around an IPv6 address", hint=_HINT)
        return host, rest[1:] if rest else None
    if text.count(":") < 2:
        host, colon, port = text.partition(":")
        if not host:
            raise UsageError(f"endpoint {text!r} has no host", hint=_HINT)
        return host, port if colon else None
    # An IPv6 address without brackets. If its last group could as well be a port, ask.
    before, _, last = text.rpartition(":")
    if last.isdigit() and _literal(before) is not None:
        raise UsageError(
            f"endpoint {text!r} can be read in two ways",
            hint=f"write [{before}]:{last}, or [{text}] for an address without a port",
        )
    return text, None


def _canonical_host(host: str) -> str:
    literal = _literal(host)
    if isinstance(literal, ipaddress.IPv6Address):
        zone = f"%{literal.scope_id}" if literal.scope_id else ""
        mapped = literal.ipv4_mapped  # printed differently by different Python versions
        return (f"::ffff:{mapped}" if mapped else str(literal).partition("%")[0]) + zone
    if literal is not None:
        return str(literal)
    name = host.removesuffix(".")
    labels = name.split(".")
    # A last label of digits is a mistyped IPv4 address; as a name it would be looked up for long.
    if len(name) > 253 or not all(map(_LABEL.match, labels)) or labels[-1].isdigit():
        raise UsageError(f"{host[:80]!r} is neither an address nor a host name", hint=_HINT)
    return name.lower()


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        literal = ipaddress.ip_address(host)
    except ValueError:
        return None
    zone = literal.scope_id if isinstance(literal, ipaddress.IPv6Address) else None
    return literal if zone is None or _ZONE.match(zone) else None
