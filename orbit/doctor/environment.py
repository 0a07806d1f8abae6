"""The environment: names that nothing reads, pins that make no sense, switches that are set."""

from __future__ import annotations

from dataclasses import replace

from ..config import KILL_SWITCH, NodeConfig, resolve, unknown_names
from ..errors import ConfigError
from .finding import Area, Finding
from .host import Host

_AREA = Area("environment")
_FORK_SAFE = ("IBV_FORK_SAFE", "RDMAV_FORK_SAFE")


def environment_findings(host: Host, config: NodeConfig) -> list[Finding]:
    found = [
        _AREA.warn(
            "environment_unknown",
            f"{name} is set, and orbit reads no such name",
            f"did you mean {nearest}? Otherwise: unset {name}",
        )
        for name, nearest in unknown_names(host.environment).items()
    ]
    problem = _problem(host, config)
    if problem is not None:
        fix = problem.hint or "correct the value, or unset it"
        found.append(_AREA.fail("environment_invalid", f"no node can be opened: {problem}", fix))
    elif not with_environment(host, config).rendezvous.enabled:
        switch = KILL_SWITCH if KILL_SWITCH in host.environment else "rendezvous.enabled=False"
        text = f"payloads by handle never go by RDMA: {switch} is set"
        found.append(_AREA.warn("kill_switch", text, f"unset {KILL_SWITCH}, and start again"))
    set_names = [name for name in _FORK_SAFE if name in host.environment]
    if set_names:
        found.append(
            _AREA.warn(
                "fork_safe",
                f"{set_names[0]} is set: each registration splits mappings, and memory in huge"
                " pages can be registered only whole",
                f"unset {set_names[0]}; Linux 5.12 and newer copy pinned pages on fork by"
                " themselves",
            )
        )
    if not found:
        pins = sorted(name for name in host.environment if name.startswith("ORBIT_"))
        text = f"set: {', '.join(pins)}" if pins else "no ORBIT_ name is set"
        found.append(_AREA.ok("environment_ok", text))
    return found


def with_environment(host: Host, config: NodeConfig) -> NodeConfig:
    """`config` with the pins of the host's environment, as far as they make sense."""
    try:
        return resolve(config, _sensible(host))
    except ConfigError:
        return resolve(replace(config, secret_file=None), {})


def _problem(host: Host, config: NodeConfig) -> ConfigError | None:
    try:
        resolve(config, _sensible(host))
    except ConfigError as error:
        return error
    return None


def _sensible(host: Host) -> dict[str, str]:
    """Without the names that `resolve` would log about: they are findings here."""
    unknown = unknown_names(host.environment)
    return {k: v for k, v in host.environment.items() if k not in unknown and "://" not in v}
