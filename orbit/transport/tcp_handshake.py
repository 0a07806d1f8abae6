"""Runs the handshake machines of protocol/bootstrap over a wire, for both ends.

Owns the bytes of a connection until it is known what the connection is: the preface, frames of
handshake size, and one absolute deadline that nothing the peer sends can extend.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import PeerProtocolError
from ..protocol.bootstrap import (
    Broken,
    Dialer,
    Disconnected,
    Epoch,
    Established,
    Listener,
    Proven,
    Refused,
)
from ..protocol.bootstrap import Effect as BootstrapEffect
from ..protocol.framing import (
    HANDSHAKE_FRAME_BYTES_MAX,
    PREFACE,
    FrameParser,
    SendFrame,
    encode_on_stream,
)
from .tcp_link import TcpLink
from .tcp_wire import Endpoint, Wire


@dataclass(frozen=True, slots=True, eq=False)
class EstablishedLink:
    """An open epoch and its control link, not started yet. `endpoint`: what was dialed, or where
    the peer dialed from."""

    epoch: Epoch
    link: TcpLink
    endpoint: Endpoint


class StreamEnded(Exception):
    """Inside the transport only: the peer, or the network, ended the connection."""


class HandshakeStream:
    """Frames on a wire, one awaited at a time. The preface goes out with the first frame, so that a
    stranger who never says a sensible word is told nothing."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.parser = FrameParser(HANDSHAKE_FRAME_BYTES_MAX)
        self._preface = PREFACE
        self._buffer = memoryview(bytearray(HANDSHAKE_FRAME_BYTES_MAX))

    async def next_frame(self) -> memoryview:
        """Raises StreamEnded, PeerProtocolError."""
        while (frame := self.parser.next_frame()) is None:
            try:
                count = self.wire.recv_into(self._buffer)
            except OSError as error:
                raise StreamEnded(error.strerror or str(error)) from error
            if count == 0:
                raise StreamEnded("the connection was closed")
            if count is None:
                await self.wire.wait_readable()
            else:
                self.parser.feed(self._buffer[:count])
        return frame

    async def send(self, *frames: bytes) -> None:
        """Raises StreamEnded."""
        if not frames:
            return
        data = b"".join(encode_on_stream(frame, HANDSHAKE_FRAME_BYTES_MAX) for frame in frames)
        data, self._preface = self._preface + data, b""
        try:
            await self.wire.send_all(data)
        except OSError as error:
            raise StreamEnded(error.strerror or str(error)) from error


async def run_handshake(
    stream: HandshakeStream, machine: Dialer | Listener, effects: Sequence[BootstrapEffect]
) -> Epoch:
    """Carry out `effects` and go on until the epoch is open, or at the listener until it may be.
    Raises the machine's typed error. The wire stays the caller's, who closes it then."""
    loop = asyncio.get_running_loop()
    deadline = machine.deadline or loop.time()
    while True:
        refused = next((effect.error for effect in effects if isinstance(effect, Refused)), None)
        try:
            async with asyncio.timeout_at(deadline):
                await stream.send(*(e.frame for e in effects if isinstance(e, SendFrame)))
                for effect in effects:
                    if isinstance(effect, Established | Proven):
                        return effect.epoch
                if refused is None:
                    effects = await _next_effects(stream, machine, loop)
        except TimeoutError:
            # The loop's timer may fire a clock tick early; the machine's clock must not.
            effects = machine.on_deadline(max(loop.time(), deadline))
        except StreamEnded as ended:
            if refused is None:
                effects = machine.step(Disconnected(str(ended)), loop.time())
        if refused is not None:  # the last word was said as far as the peer took it
            raise refused


async def _next_effects(
    stream: HandshakeStream, machine: Dialer | Listener, loop: asyncio.AbstractEventLoop
) -> list[BootstrapEffect]:
    try:
        frame = await stream.next_frame()
    except PeerProtocolError as error:
        return machine.step(Broken(error), loop.time())
    return machine.on_frame(frame, loop.time())
