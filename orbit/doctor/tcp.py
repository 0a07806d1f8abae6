"""The limits of TCP: how large buffers grow, how many ports and waiting connections there are."""

from __future__ import annotations

from ..config import MIB
from .finding import Area, Finding
from .seen import Seen

_AREA = Area("tcp")
_BUFFER_MIN = 4 * MIB  # 34 Gb/s at a round trip of 1 ms; Linux's own defaults are no smaller
_PORTS_MIN = 1024
_BACKLOG_MIN = 128  # the default before Linux 5.4: enough but for very many peers at once
_RTT_S = 0.001


def tcp_findings(seen: Seen) -> list[Finding]:
    host, ipv4 = seen.host, seen.host.proc / "sys/net/ipv4"
    found = [
        _buffer(name, host.read(ipv4 / name), advice)
        for name, advice in (
            ("tcp_rmem", "4096 131072 67108864"),
            ("tcp_wmem", "4096 65536 67108864"),
        )
    ]
    found.append(_ports(host.read(ipv4 / "ip_local_port_range")))
    backlog = host.number(host.proc / "sys/net/core/somaxconn")
    if backlog is not None and backlog < _BACKLOG_MIN:
        text = f"net.core.somaxconn is {backlog}: when many peers connect at once, some wait"
        fix = "sysctl -w net.core.somaxconn=4096"
        found.append(_AREA.warn("backlog_small", text, fix, somaxconn=backlog))
    control = host.read(ipv4 / "tcp_congestion_control")
    if control:
        found.append(_AREA.ok("congestion_control", f"congestion control: {control}"))
    return found


def _buffer(name: str, text: str, advice: str) -> Finding:
    words = text.split()
    if len(words) != 3:
        return _AREA.skip("tcp_buffer_unknown", f"net.ipv4.{name} cannot be read")
    most = int(words[2])
    rate = most * 8 / _RTT_S / 1e9
    shown = f"net.ipv4.{name} grows to {most / MIB:.4g} MiB: {rate:.3g} Gb/s at a round trip of"
    shown += f" {_RTT_S * 1000:g} ms, on one connection"
    if most < _BUFFER_MIN:
        fix = f"sysctl -w net.ipv4.{name}='{advice}'"
        return _AREA.warn("tcp_buffer_small", shown, fix, name=name, max_bytes=most)
    return _AREA.ok("tcp_buffer", shown, name=name, max_bytes=most)


def _ports(text: str) -> Finding:
    words = text.split()
    if len(words) != 2:
        return _AREA.skip("ports_unknown", "net.ipv4.ip_local_port_range cannot be read")
    first, last = int(words[0]), int(words[1])
    count = last - first + 1
    shown = f"{count} ports for outgoing connections ({first} to {last})"
    if count < _PORTS_MIN:
        fix = "sysctl -w net.ipv4.ip_local_port_range='32768 60999'"
        shown += ": connecting fails with 'cannot assign requested address' when all are taken"
        return _AREA.warn("ports_few", shown, fix, ports=count)
    return _AREA.ok("ports_ok", shown, ports=count)
