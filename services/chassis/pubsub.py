"""Pub/sub on one Valkey connection, with as little work for a message as Python allows.

redis-py spends about 18 µs on each message; hiredis under a plain protocol spends 1.4, and a relay takes thousands a
second. Messages published while the connection is away are lost: `on_reconnect` says that this may have happened.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections.abc import Callable
from typing import Any, Self, cast

import hiredis
from redis.asyncio.connection import SSLConnection, parse_url

from hearth.secret import Secret

logger = logging.getLogger(__name__)

OnMessage = Callable[[bytes, bytes], None]

_CONNECT_TIMEOUT_SECONDS = 5.0
_PING_EVERY_SECONDS = 5.0
# With no byte for this long, despite the pings, the connection counts as lost.
_SILENCE_SECONDS = 12.0
_BACKOFF_FIRST_SECONDS = 0.05
_BACKOFF_MAX_SECONDS = 2.0


class PubSubError(Exception):
    """The server refused a command, or the client is closed."""


class PubSub:
    """Channels of one server. Not for use from several threads.

    `on_message(channel, data)` is called from the read loop and must not block. `on_lost()` is called when the
    connection breaks, `on_reconnect()` when it is back and every channel is confirmed again.
    """

    def __init__(
        self,
        url: Secret,
        on_message: OnMessage,
        *,
        on_lost: Callable[[], None] | None = None,
        on_reconnect: Callable[[], None] | None = None,
    ) -> None:
        self._target = _Target(url)
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_reconnect = on_reconnect
        self._confirmed: dict[bytes, asyncio.Future[None]] = {}
        # How many SUBSCRIBE of a channel are not answered: after an unsubscribe in between, only the last one counts.
        self._asked: dict[bytes, int] = {}
        self._link: _Link | None = None
        self._closed = False
        self._keeper: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls,
        url: Secret,
        on_message: OnMessage,
        *,
        on_lost: Callable[[], None] | None = None,
        on_reconnect: Callable[[], None] | None = None,
    ) -> Self:
        """A connected client; raises `OSError` or `PubSubError` when the first connection fails."""
        client = cls(url, on_message, on_lost=on_lost, on_reconnect=on_reconnect)
        client._link = await client._open()
        client._keeper = asyncio.create_task(client._keep(), name="pubsub")
        return client

    @property
    def connected(self) -> bool:
        """Whether messages arrive at present."""
        return self._link is not None and not self._link.lost.done()

    async def subscribe(self, channel: bytes) -> None:
        """Return when the server has confirmed the subscription: what is published from then on is seen.

        While the connection is away this waits for it; bound it with a timeout. Subscribing again to a channel returns
        when that channel is confirmed. Raises `PubSubError` when the client is closed or the server refuses.
        """
        if self._closed:
            raise PubSubError("the client is closed")
        confirmed = self._confirmed.get(channel)
        if confirmed is None:
            confirmed = self._confirmed[channel] = asyncio.get_running_loop().create_future()
            if self.connected:
                self._ask(channel)
        await asyncio.shield(confirmed)

    def unsubscribe(self, channel: bytes) -> None:
        """Take no more messages of `channel`; those on their way are dropped."""
        confirmed = self._confirmed.pop(channel, None)
        if confirmed is None:
            return
        if not confirmed.done():
            confirmed.set_exception(PubSubError("unsubscribed"))
            confirmed.exception()
        if self.connected and self._link is not None:
            self._link.send(b"UNSUBSCRIBE", channel)

    async def close(self) -> None:
        """Close the connection; pending subscriptions fail."""
        self._closed = True
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        if self._link is not None:
            self._link.close()
        for channel in list(self._confirmed):
            self.unsubscribe(channel)

    async def _open(self) -> _Link:
        loop = asyncio.get_running_loop()
        link = _Link(self._message, self._confirm)
        async with asyncio.timeout(_CONNECT_TIMEOUT_SECONDS):
            await self._target.connect(loop, link)
            try:
                await link.ask(*self._target.login)
            except BaseException:
                link.close()
                raise
        return link

    async def _keep(self) -> None:
        while True:
            link = self._link
            assert link is not None
            await link.watch()
            logger.warning("bus connection lost")
            for channel, confirmed in self._confirmed.items():
                if confirmed.done():
                    self._confirmed[channel] = asyncio.get_running_loop().create_future()
            self._tell(self._on_lost)
            self._link = await self._reopen()
            self._asked.clear()
            for channel in self._confirmed:
                self._ask(channel)
            if await self._all_confirmed(self._link):
                logger.info("bus connection is back", extra={"channels": len(self._confirmed)})
                self._tell(self._on_reconnect)

    async def _reopen(self) -> _Link:
        pause = _BACKOFF_FIRST_SECONDS
        while True:
            try:
                return await self._open()
            except (OSError, TimeoutError, PubSubError) as error:
                logger.debug("bus is still away", extra={"cause": str(error)})
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - spreads reconnects, keeps no secret
            pause = min(pause * 2, _BACKOFF_MAX_SECONDS)

    async def _all_confirmed(self, link: _Link) -> bool:
        pending = [future for future in self._confirmed.values() if not future.done()]
        if not pending:
            return True
        shielded = (asyncio.shield(future) for future in pending)
        gathered: asyncio.Future[Any] = asyncio.gather(*shielded, return_exceptions=True)
        await asyncio.wait([gathered, link.lost], return_when=asyncio.FIRST_COMPLETED)
        if gathered.done():
            return not link.lost.done()
        gathered.cancel()
        return False

    def _message(self, channel: bytes, data: bytes) -> None:
        if channel in self._confirmed:
            try:
                self._on_message(channel, data)
            except Exception:
                logger.exception("handling a bus message failed")

    def _ask(self, channel: bytes) -> None:
        assert self._link is not None
        self._asked[channel] = self._asked.get(channel, 0) + 1
        self._link.send(b"SUBSCRIBE", channel)

    def _confirm(self, channel: bytes) -> None:
        waiting = self._asked.pop(channel, 1) - 1
        if waiting:
            self._asked[channel] = waiting
            return
        confirmed = self._confirmed.get(channel)
        if confirmed is not None and not confirmed.done():
            confirmed.set_result(None)

    def _tell(self, callback: Callable[[], None] | None) -> None:
        if callback is not None:
            try:
                callback()
            except Exception:
                logger.exception("a bus callback failed")


class _Target:
    """Where to connect and how to log in, from a URL as redis-py takes it."""

    def __init__(self, secret: Secret) -> None:
        url = secret.reveal()
        found: dict[str, Any] = dict(parse_url(url))
        self._path: str | None = found.get("path")
        self._host: str = found.get("host", "localhost")
        self._port: int = found.get("port", 6379)
        self._tls = _context_of(found) if url.startswith("rediss://") else None
        password, user = found.get("password"), found.get("username")
        if password is None:
            self.login: tuple[bytes, ...] = (b"PING",)
        elif user is None:
            self.login = (b"AUTH", password.encode())
        else:
            self.login = (b"AUTH", user.encode(), password.encode())

    async def connect(self, loop: asyncio.AbstractEventLoop, link: _Link) -> None:
        if self._path is not None:
            await loop.create_unix_connection(lambda: link, self._path)
        else:
            await loop.create_connection(lambda: link, self._host, self._port, ssl=self._tls)


def _context_of(found: dict[str, Any]) -> ssl.SSLContext:
    """What redis-py makes of `ssl_ca_certs`, `ssl_certfile` and the like: both clients must believe the same server."""
    wanted = {name: value for name, value in found.items() if name.startswith("ssl_")}
    return SSLConnection(**wanted).ssl_context.get()


class _Link(asyncio.Protocol):
    """One connection, from its opening to its loss."""

    def __init__(self, on_message: OnMessage, on_confirmed: Callable[[bytes], None]) -> None:
        self._reader = hiredis.Reader()
        self._on_message = on_message
        self._on_confirmed = on_confirmed
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()
        self.lost: asyncio.Future[None] = self._loop.create_future()

    async def ask(self, *command: bytes) -> None:
        """Send a command before any subscription and wait for its answer."""
        self._answer = self._loop.create_future()
        self.send(*command)
        await self._answer

    def send(self, *command: bytes) -> None:
        """Queue a command; one sent after the loss goes nowhere, and the loss is told by `lost`."""
        if self._transport is not None and not self._transport.is_closing():
            packed = hiredis.pack_command(command)  # type: ignore[arg-type]
            self._transport.write(packed)

    async def watch(self) -> None:
        """Ping until the connection is lost, and call it lost when nothing comes back."""
        while not self.lost.done():
            await asyncio.wait([self.lost], timeout=_PING_EVERY_SECONDS)
            if self._loop.time() - self._heard > _SILENCE_SECONDS:
                self.close()
                await asyncio.wait([self.lost])
            else:
                self.send(b"PING")

    def close(self) -> None:
        """Drop the connection; nothing that is not yet sent is waited for."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio's, but not the class.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        self._reader.feed(data)
        while True:
            try:
                reply: Any = self._reader.gets()
            except hiredis.ProtocolError as error:
                logger.error("bus sent what is no RESP", extra={"cause": str(error)})
                self.close()
                return
            if reply is False:
                return
            if type(reply) is list and reply[0] == b"message":
                self._on_message(reply[1], reply[2])
            else:
                self._other(reply)

    def _other(self, reply: object) -> None:
        if isinstance(reply, list) and reply[0] == b"subscribe":
            self._on_confirmed(reply[1])
        elif self._answer is not None and not self._answer.done():
            if isinstance(reply, hiredis.HiredisError):
                self._answer.set_exception(PubSubError(str(reply)))
            else:
                self._answer.set_result(None)
        elif isinstance(reply, hiredis.HiredisError):
            # A refused SUBSCRIBE names no channel; a new connection asks again for all of them.
            logger.error("bus refused a command", extra={"cause": str(reply)})
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionResetError("the bus closed the connection"))
        if not self.lost.done():
            self.lost.set_result(None)
