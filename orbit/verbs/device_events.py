"""Asynchronous events of one device, handed to whoever watches them.

Owns the reader of the device's event descriptor, from the first watcher on. Each event is got and
acknowledged in one breath by the provider (D9); what it means is the watchers' business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ..errors import DeviceError
from .async_events import AsyncEvent, Subject
from .provider import NativeContext

logger = logging.getLogger("orbit.verbs")

EventHandler = Callable[[AsyncEvent], None]

_EVENTS_PER_CALLBACK = 64  # the descriptor stays readable for what is left


class DeviceEvents:
    """All of it runs in the loop's thread."""

    def __init__(self, context: NativeContext) -> None:
        self._context = context
        self._handlers: list[EventHandler] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fd = -1
        self.lost: DeviceError | None = None  # nothing is heard of the device any more

    def watch(self, handler: EventHandler) -> None:
        self._handlers.append(handler)
        if self._fd < 0:
            self._loop = asyncio.get_running_loop()
            self._fd = self._context.async_fd
            self._loop.add_reader(self._fd, self._on_readable)

    def unwatch(self, handler: EventHandler) -> None:
        if handler in self._handlers:
            self._handlers.remove(handler)

    def close(self) -> None:
        """Before the context closes."""
        if self._loop is not None and self._fd >= 0 and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        self._fd = -1
        self._handlers.clear()

    def _on_readable(self) -> None:
        for _ in range(_EVENTS_PER_CALLBACK):
            try:
                event = self._context.next_async_event()
            except DeviceError as error:
                logger.error(
                    "%s: asynchronous events cannot be read: %s", self._context.device, error
                )
                self.lost = error
                self.close()
                return
            if event is None:
                return
            level = logging.DEBUG if event.subject is Subject.SHARED_RECEIVE else logging.INFO
            logger.log(level, "%s: event %s", self._context.device, event.kind)
            for handler in tuple(self._handlers):
                try:
                    handler(event)
                except Exception:  # one watcher's bug must not cost the others the event
                    logger.exception("handling %s failed", event.kind)
