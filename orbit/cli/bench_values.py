"""What the words of `orbit bench` come to: sizes, verbs, plans and the settings of a node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import click

from ..bench.ends import NodeSettings
from ..bench.plan import Plan, Verb, Verify
from ..bench.slots import bytes_needed
from ..errors import UsageError
from ..model import Transport
from .options import parse_size

SIZES_DEFAULT: Final = "64K,1M,16M,64M"
DURATION_DEFAULT_S: Final = 1.0


def parse_sizes(text: str) -> tuple[int, ...]:
    """4K, a list 4K,64K, a sweep 4K..64M that doubles and always has its end, or a list of these.
    In the order given, each once.
    """
    found: dict[int, None] = {}
    for part in text.split(","):
        first, dots, last = part.partition("..")
        size = parse_size(first)
        end = parse_size(last) if dots else size
        if not 0 < size <= end:
            raise click.BadParameter(f"{part!r} is no sweep; write it as 4K..64M")
        while size < end:
            found[size] = None
            size *= 2
        found[end] = None
    return tuple(found)


def parse_verbs(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> tuple[Verb, ...]:
    """Of a repeatable option, each a name or a list of names."""
    names = [name.strip() for text in given for name in text.split(",")]
    unknown = [name for name in names if name not in set(Verb)]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(Verb)}")
    return tuple(dict.fromkeys(Verb(name) for name in names))


def plans_of(given: Mapping[str, Any]) -> tuple[Plan, ...]:
    """One for each verb. Raises UsageError."""
    duration, iterations = given["duration"], given["iterations"]
    if duration is not None and iterations is not None:
        raise UsageError("give either --iterations or --duration")
    if iterations is None and duration is None:
        duration = DURATION_DEFAULT_S
    return tuple(
        Plan(
            verb=verb,
            sizes=given["sizes"],
            transport=Transport(given["transport"]),
            batch=given["batch"],
            inflight=given["inflight"],
            iterations=iterations,
            duration=duration,
            warmup=given["warmup"],
            verify=Verify(given["verify"]),
            seed=given["seed"],
            baseline=not given["no_baseline"],
        )
        for verb in given["verbs"]
    )


def bytes_of(plans: tuple[Plan, ...]) -> int:
    """What either end must be able to use at once for any of them. A plain loop has buffers for
    both ways.
    """
    return 2 * max(map(bytes_needed, plans))


def settings_of(given: Mapping[str, Any], buffer_bytes: int) -> NodeSettings:
    return NodeSettings(
        listen=given.get("listen", "127.0.0.1:0"),
        advertise=given.get("advertise", ()),
        secret_file=given["secret_file"],
        transport=Transport(given["transport"]),
        devices=given["devices"],
        gid_index=given["gid_index"],
        rails=given["rails"],
        lanes=given["lanes"],
        progress=given["progress"],
        host_memory=given["host_memory"],
        buffer_bytes=buffer_bytes,
    )


def words_of(settings: NodeSettings) -> list[str]:
    """The options that set up a node like this one, but for where it listens."""
    words = ["--transport", str(settings.transport), "--lanes", str(settings.lanes)]
    words += ["--progress", settings.progress, "--host-memory", settings.host_memory]
    for device in settings.devices:
        words += ["--device", device]
    for name in ("rails", "gid_index", "secret_file"):
        value = getattr(settings, name)
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words
