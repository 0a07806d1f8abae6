"""What a node would listen on and tell its peers to dial, and whether they could."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from ..errors import ConfigError, UsageError
from ..protocol.endpoint import Endpoint
from .finding import Area, Finding
from .host import Host
from .seen import Seen

_AREA = Area("addresses")


def address_findings(seen: Seen) -> list[Finding]:
    host, config = seen.host, seen.config
    try:
        listen = Endpoint.parse(config.listen)
        advertised = [Endpoint.parse(text, listen.port) for text in config.advertise]
    except UsageError as error:
        fix = error.hint or "correct it"
        return [_AREA.fail("address_invalid", f"no node can be opened: {error}", fix)]
    found = [_host_name(host, [listen, *advertised]), _listen(host, listen)]
    return found + _advertisement(seen, listen, advertised)


def _host_name(host: Host, used: list[Endpoint]) -> Finding:
    """Debian gives each host's own name 127.0.1.1: that is a trouble only where peers meet it."""
    for name in (endpoint.host for endpoint in used if _names_loopback(host, endpoint.host)):
        given = _hosts_entry(host, name)[0]
        text = f"{name} is {given} in /etc/hosts: a node that listens on this name is reached from"
        text += " here alone, and a peer that is told it dials itself"
        fix = "listen on 0.0.0.0 or an address (--listen), advertise an address (--advertise);"
        fix += f" or give {name} a routable address in /etc/hosts"
        return _AREA.warn("hostname_loopback", text, fix, name=name, address=given)
    name = host.read(host.proc / "sys/kernel/hostname")
    if not name:
        return _AREA.skip("hostname_unknown", "the host's name cannot be read")
    addresses = _hosts_entry(host, name)
    if not addresses:
        text = f"the host name {name} is not in /etc/hosts; name servers were not asked"
        return _AREA.skip("hostname_not_listed", text)
    text = f"the host name {name} is {addresses[0]} in /etc/hosts"
    if _names_loopback(host, name):
        text += ": do not listen on it, and do not advertise it"
    return _AREA.ok("hostname_ok", text, name=name, address=addresses[0])


def _names_loopback(host: Host, name: str) -> bool:
    """Whether it is a name, other than localhost, that stands for this host alone."""
    if name.lower() == "localhost" or _is_address(name):
        return False
    return _is_loopback(host, name)


def _listen(host: Host, listen: Endpoint) -> Finding:
    if host.listen is None:
        return _AREA.skip("listen_untried", f"listening on {listen} was not tried")
    try:
        host.listen(*listen.pair)
    except ConfigError as error:
        text = f"nobody can listen on {listen}: {error}"
        fix = error.hint or "choose another address or port"
        return _AREA.fail("listen_refused", text, fix, port=listen.port)
    return _AREA.ok("listen_ok", f"listening on {listen} works", port=listen.port)


def _advertisement(seen: Seen, listen: Endpoint, advertised: list[Endpoint]) -> list[Finding]:
    local = listen.is_loopback or _is_loopback(seen.host, listen.host)
    if advertised:
        wrong = [one for one in advertised if _is_loopback(seen.host, one.host) or one.is_wildcard]
        if wrong and not local:
            if any(_names_loopback(seen.host, one.host) for one in wrong):
                return []  # said of the name
            text = f"{wrong[0]} is advertised, where peers on other hosts reach themselves"
            fix = "advertise an address of this host that peers can route to"
            return [_AREA.warn("advertise_loopback", text, fix)]
        return [_AREA.ok("advertise_ok", f"advertised: {', '.join(map(str, advertised))}")]
    if local:
        if _names_loopback(seen.host, listen.host):
            return []  # said of the name
        text = f"a node listens on {listen.host}: this host alone can reach it"
        return [_AREA.ok("listen_loopback", text)]
    if not listen.is_wildcard:
        return [_AREA.ok("advertise_ok", f"peers are told {listen.host}")]
    own = [text for dev in seen.discovery.netdevs.values() if dev.up for text in dev.addresses]
    told = [text for text in own if _routable(text)]
    if not told:
        text = "peers are told this host's addresses, and it has none but loopback and link-local"
        fix = "set advertise (--advertise ADDRESS)"
        return [_AREA.warn("advertise_nothing", text, fix)]
    return [_AREA.ok("advertise_ok", f"peers are told {', '.join(sorted(told))}")]


def _routable(text: str) -> bool:
    address = ipaddress.ip_address(text.partition("%")[0])
    return not (address.is_loopback or address.is_link_local)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True


def _is_loopback(host: Host, name: str) -> bool:
    """Of an address, or of any that /etc/hosts gives a name."""
    given = [name.partition("%")[0]] if _is_address(name) else _hosts_entry(host, name)
    return any(ipaddress.ip_address(address).is_loopback for address in given)


def _hosts_entry(host: Host, name: str) -> list[str]:
    """The addresses that /etc/hosts gives a name, in order."""
    return [address for address, names in _hosts(host) if name.lower() in names]


def _hosts(host: Host) -> Iterator[tuple[str, list[str]]]:
    for line in host.read(host.etc / "hosts").splitlines():
        address, *names = line.partition("#")[0].split() or [""]
        if _is_address(address):
            yield address.partition("%")[0], [name.lower() for name in names]
