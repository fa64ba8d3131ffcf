"""The bus as the relay hears it: one connection for all channels of the process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from hearth.secret import Secret
from services.chassis.pubsub import PubSub

logger = logging.getLogger(__name__)

Handler = Callable[[bytes], None]

# A server that is there confirms in a millisecond. One that does not is treated as one that is away.
_CONFIRM_SECONDS = 2.0


class Bus:
    """Channels and who hears them. Several may hear one channel."""

    def __init__(self, url: Secret) -> None:
        self._url = url
        # Called when `connected` changed.
        self.on_change: Callable[[], None] = lambda: None
        self._handlers: dict[bytes, list[Handler]] = {}
        self._client: PubSub | None = None

    async def start(self) -> None:
        """Connect; raises `OSError` or `PubSubError` when that fails."""
        self._client = await PubSub.connect(self._url, self._message, on_lost=self._changed, on_reconnect=self._changed)

    @property
    def connected(self) -> bool:
        """Whether messages arrive at present."""
        return self._client is not None and self._client.connected

    @property
    def channels(self) -> int:
        """How many channels are heard."""
        return len(self._handlers)

    async def listen(self, channel: bytes, handler: Handler) -> None:
        """Hear `channel`. Returns once the server has confirmed it, or at once while the server is away.

        In that case messages come once it is back, which `on_change` tells.
        """
        assert self._client is not None
        self._handlers.setdefault(channel, []).append(handler)
        asking = asyncio.create_task(self._client.subscribe(channel), name="bus subscribe")
        try:
            # While the server is away, asking only notes the channel: it is subscribed when the connection is back.
            await asyncio.wait([asking], timeout=_CONFIRM_SECONDS if self._client.connected else 0)
        finally:
            if not asking.cancel() and (error := asking.exception()) is not None:
                logger.warning("bus refused a channel", extra={"cause": str(error)})
            if channel not in self._handlers:
                # Whoever listened went away before the channel was asked for, so that there was nothing to undo then.
                self._client.unsubscribe(channel)

    def ignore(self, channel: bytes, handler: Handler) -> None:
        """Hear `channel` no more with this handler."""
        handlers = self._handlers.get(channel)
        if handlers is None or handler not in handlers:
            return
        handlers.remove(handler)
        if not handlers:
            del self._handlers[channel]
            if self._client is not None:
                self._client.unsubscribe(channel)

    async def close(self) -> None:
        """Disconnect."""
        if self._client is not None:
            await self._client.close()

    def _changed(self) -> None:
        self.on_change()

    def _message(self, channel: bytes, data: bytes) -> None:
        for handler in self._handlers.get(channel, ()):
            handler(data)
