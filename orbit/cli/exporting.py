"""The metrics endpoint of a command: what `--metrics HOST[:PORT]` opens, and closes with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..protocol.endpoint import Endpoint
from .options import METRICS_PORT

if TYPE_CHECKING:
    from ..engine import TransferEngine
    from ..node import Node


@contextlib.asynccontextmanager
async def exporting(
    where: str | None, node: Node, engine: TransferEngine | None = None
) -> AsyncIterator[str | None]:
    """Serve the series of `node` and of `engine` at `where`, and yield the URL; None: nowhere.

    Raises UsageError (no endpoint, or prometheus_client is missing) and ConfigError (it cannot
    listen there).
    """
    if where is None:
        yield None
        return
    host, port = Endpoint.parse(where, METRICS_PORT).pair
    try:
        from ..metrics import start_http_server
    except ImportError as error:
        raise UsageError(str(error), hint="pip install 'orbit[metrics]'") from error
    server = start_http_server(node, port, host, engine=engine)
    try:
        yield server.url
    finally:
        await asyncio.to_thread(server.close)  # the loop goes on answering scrapes meanwhile
