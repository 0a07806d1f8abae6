"""What all findings come to: does TCP work, and does RDMA, on what?"""

from __future__ import annotations

from collections.abc import Sequence

from ..config import NodeConfig
from ..model import PathReason, Transport
from ..verbs.libraries import VerbsFacts
from .advice import fix_for, rdma_level
from .finding import Area, Finding, Level
from .greeting import PEER
from .host import Host
from .seen import look

_PATHS = Area("paths")


def rdma_verdict(host: Host, config: NodeConfig, findings: Sequence[Finding]) -> Finding:
    """One finding for RDMA as a whole, from what was tried; if nothing was, from what is listed.
    Its level is what the lack of RDMA means for what was asked for.
    """
    if config.transport == Transport.TCP or not config.rdma.enabled:
        return _PATHS.skip("rdma_not_asked", "RDMA: not asked for")
    works = [f.data["device"] for f in findings if f.code == "grant_works"]
    failed = [f for f in findings if f.code == "grant_failed"]
    if works:
        text = f"RDMA: usable on {', '.join(works)}"
        if failed:
            text += f", and not on {', '.join(f.data['device'] for f in failed)}"
        return _PATHS.ok("rdma_usable", text, devices=works)
    if failed:
        return _missing(config, failed[0].text, failed[0].fix, failed[0].data["reason"])
    for skipped in (f for f in findings if f.code == "grant_skipped"):
        reason = PathReason(skipped.data["reason"])
        return _missing(config, _short(skipped.data["detail"]) or reason, fix_for(reason), reason)
    return _untried(host, config)


def summary(findings: Sequence[Finding], verdict: Finding) -> str:
    """The last line of a page."""
    codes = {finding.code for finding in findings}
    tcp = "TCP: not tried"
    if "tcp_works" in codes:
        tcp = "TCP works"
    elif "tcp_failed" in codes:
        tcp = "TCP does not work"
    parts = [tcp, verdict.text]
    peer = [finding for finding in findings if finding.area == PEER.name]
    if peer:
        parts.append(_of_peer(peer))
    return "; ".join(parts)


def _of_peer(findings: Sequence[Finding]) -> str:
    codes = {finding.code for finding in findings}
    paths = {"peer_grant": "RDMA", "peer_tcp": "TCP", "peer_messages": "TCP"}
    works = next((f"{name} works" for code, name in paths.items() if code in codes), "")
    bad = [finding for finding in findings if finding.level >= Level.WARN]
    if not bad:
        return f"the peer: {works}"
    worst = max(bad, key=lambda finding: finding.level)  # the first of them
    stage = worst.text.partition(":")[0]
    said = f"failed at {stage}" if worst.level is Level.FAIL else f"a warning at {stage}"
    return f"the peer: {works}, {said}" if works else f"the peer: {said}"


def _missing(config: NodeConfig, why: str, fix: str, reason: str) -> Finding:
    fix = fix or "see the lines above"
    text = f"RDMA: not usable: {why}"
    return _PATHS.at(rdma_level(config), "rdma_missing", text, fix, reason=str(reason))


def _unloaded(verbs: VerbsFacts) -> tuple[str, str, PathReason]:
    """What is wrong with the libraries, the fix, and the reason."""
    if not verbs.pyverbs:
        reason = PathReason.NO_PYVERBS
        return "pyverbs is not installed", fix_for(reason), reason
    if verbs.helper_problem:
        return verbs.helper_problem, fix_for(PathReason.NO_HELPER), PathReason.NO_HELPER
    return verbs.pyverbs_problem, "", PathReason.NO_PYVERBS


def _short(detail: str) -> str:
    """Of many devices the first: each has a line of its own above."""
    first, *others = detail.split("; ")
    return f"{first}; and {len(others)} more" if len(others) > 1 else detail


def _untried(host: Host, config: NodeConfig) -> Finding:
    """From the trees alone. A host that is not this one has libraries that nobody knows."""
    seen = look(host, config)
    if seen.verbs is not None and not seen.verbs.usable:
        return _missing(config, *_unloaded(seen.verbs))
    if seen.refused is not None:
        return _missing(config, str(seen.refused), "", PathReason.NO_DEVICE)
    devices = list(dict.fromkeys(rail.rail.device for rail in seen.rails if rail.active))
    if not devices:
        reason = seen.discovery.reason
        return _missing(config, _short(seen.discovery.detail), fix_for(reason), reason)
    can = "look usable" if host.verbs is None else "can be opened"
    text = f"RDMA: not tried ({', '.join(devices)} {can})"
    return _PATHS.skip("rdma_untried", text, devices=devices)
