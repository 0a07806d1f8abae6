"""A relay that knows frames: it can lose one that the dialer sends, or send it twice."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass

from orbit.protocol.address import NodeAddress
from orbit.protocol.framing import (
    FRAME_BYTES_MAX,
    PREFACE,
    FrameKind,
    FrameParser,
    encode_on_stream,
    split_frame,
)
from tests.integration.relay import Relay, _Pair

_CHUNK_BYTES = 64 << 10


@dataclass(eq=False)
class FrameRelay(Relay):
    """Calls of `method` go through `copies` times."""

    method: bytes = b""
    copies: int = 1
    seen: int = 0

    async def _pump(
        self,
        pair: _Pair,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        rng: random.Random,
    ) -> None:
        if writer is pair.writers[0]:  # towards the dialer
            await super()._pump(pair, reader, writer, rng)
            return
        parser = FrameParser(FRAME_BYTES_MAX)
        writer.write(PREFACE)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_CHUNK_BYTES):
                parser.feed(data)
                for frame in parser.frames():
                    writer.write(encode_on_stream(bytes(frame)) * self._times(frame))
                    if split_frame(frame)[0] is FrameKind.BULK_HELLO:
                        writer.write(parser.take_rest())  # what follows has no frames
                        await super()._pump(pair, reader, writer, rng)
                        return
                await writer.drain()
            writer.close()

    def _times(self, frame: memoryview) -> int:
        kind, body = split_frame(frame)
        if kind is FrameKind.CALL and self.method in bytes(body):
            self.seen += 1
            return self.copies
        return 1


@contextlib.asynccontextmanager
async def frame_relay(of: NodeAddress, method: bytes, copies: int) -> AsyncIterator[FrameRelay]:
    """In front of that node."""
    it = FrameRelay(of.endpoints[0].pair, method=method, copies=copies)
    await it.open()
    try:
        yield it
    finally:
        await it.close()
