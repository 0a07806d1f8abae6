"""The circumstances of both ends as lines of text; the mapping is orbit/bench/header.py's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..bench.paths import rail_words, rdma_words
from .output import human_bytes

_INDENT = " " * 8


def end_lines(client: Mapping[str, Any], server: Mapping[str, Any]) -> list[str]:
    """The server's are left out where they are the client's."""
    lines = list(_end("client", client))
    theirs = list(_end("server", server))
    if [line[len(_INDENT) :] for line in lines] == [line[len(_INDENT) :] for line in theirs]:
        return [*lines, "server  as the client"]
    return lines + theirs


def _end(name: str, facts: Mapping[str, Any]) -> Iterator[str]:
    parts = (_software(facts), _machine(facts), _network(facts), *_rails(facts))
    for number, text in enumerate(part for part in parts if part):
        yield (f"{name:8}" if number == 0 else _INDENT) + text


def _software(facts: Mapping[str, Any]) -> str:
    versions = dict(facts.get("versions", {}))
    orbit = f"orbit {versions.pop('orbit', '(not installed)')}"
    if "revision" in facts:
        orbit += f" ({facts['revision']})"
    found = [f"{facts.get('host', 'unknown host')}: {orbit}", f"Python {facts.get('python', '?')}"]
    found += [f"{package} {version}" for package, version in versions.items()]
    return ", ".join(found)


def _machine(facts: Mapping[str, Any]) -> str:
    found = [f"kernel {facts.get('kernel', '?')} {facts.get('machine', '')}".rstrip()]
    found += [str(facts["cpu"])] if "cpu" in facts else []
    if "affinity" in facts:
        found.append(f"affinity {facts['affinity']} of {facts.get('cpus', '?')} CPUs")
    found.append(f"governor {facts.get('governor', 'none')}")
    if "numa_nodes" in facts:
        found.append(f"NUMA nodes {facts['numa_nodes']}")
    limit = facts.get("memlock")
    if limit is not None:
        found.append(f"memlock {human_bytes(limit) if isinstance(limit, int) else limit}")
    return ", ".join(found)


def _network(facts: Mapping[str, Any]) -> str:
    mtus = [f"{name} {mtu}" for name, mtu in facts.get("netdev_mtus", {}).items()]
    found = [f"MTU {', '.join(mtus)}"] if mtus else []
    if "congestion" in facts:
        found.append(f"congestion control {facts['congestion']}")
    if not facts.get("rails"):
        found.append(f"no RDMA: {facts['rdma']}" if facts.get("rdma") else "no RDMA rail")
    return "; ".join(found)


def _rails(facts: Mapping[str, Any]) -> Iterator[str]:
    for rail in facts.get("rails", ()):
        found = [rail.get("provider", ""), rail.get("rate", ""), f"MTU {rail.get('mtu', '?')}"]
        if "firmware" in rail:
            found.append(f"firmware {rail['firmware']}")
        if rail.get("numa_node", -1) >= 0:
            found.append(f"NUMA node {rail['numa_node']}")
        words = rail_words(rail.get("device"), rail.get("port"), rail.get("gid_index"))
        yield f"{rdma_words([words])} {rail.get('gid', '')}: {', '.join(filter(None, found))}"
