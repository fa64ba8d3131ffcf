"""The daemon's event stream: cutting it into messages, and following it over broken connections without a hole.

The daemon numbers its messages 1, 2, 3 … and keeps the last ones, so a connection that broke is resumed after the last
number. A number that does not follow is looked into over a new connection: the real daemon leaves a message out that it
takes while it begins to serve a reader, and drops what a slow one has not read, but keeps both. What that connection
does not bring either is gone for good.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import aiohttp
from opentelemetry.instrumentation.utils import suppress_http_instrumentation

from services.chassis.clock import Clock
from services.pool.harness.port import HarnessError

logger = logging.getLogger(__name__)

# Of one message, and of one line.
MESSAGE_BYTES = 16 * 1024 * 1024
# agentd says in it how far its messages go; the real daemon says nothing.
NEWEST_HEADER = "Hearth-Newest-Event"
READ_BYTES = 256 * 1024


class MalformedStream(Exception):
    """What came is no event stream of the dialect; the text says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One message: its number, None when it has none, and its data."""

    number: int | None
    data: bytes


class Parser:
    """Cuts bytes into events. One for each connection; what is incomplete at its end is thrown away."""

    def __init__(self, limit: int = MESSAGE_BYTES) -> None:
        self._limit = limit
        self._line: list[bytes] = []
        self._size = 0
        self._after_return = False
        self._data: bytearray | None = None
        self._number: int | None = None

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that `chunk` completes. Raises `MalformedStream`."""
        if self._after_return and chunk.startswith(b"\n"):
            chunk = chunk[1:]
        self._after_return = chunk.endswith(b"\r")
        events: list[Event] = []
        for piece in chunk.splitlines(keepends=True):
            self._line.append(piece)
            self._size += len(piece)
            if self._size > self._limit:
                raise MalformedStream(f"a line of more than {self._limit} bytes")
            if piece.endswith((b"\n", b"\r")):
                line = b"".join(self._line).rstrip(b"\r\n")
                self._line, self._size = [], 0
                if line:
                    self._take(line)
                elif self._data is not None:
                    events.append(Event(self._number, bytes(self._data)))
                    self._data, self._number = None, None
        return events

    def _take(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            if self._data is None:
                self._data = bytearray(value)
            else:
                self._data += b"\n" + value
            if len(self._data) > self._limit:
                raise MalformedStream(f"a message of more than {self._limit} bytes")
        elif name == b"id":
            if not value.isdigit() or len(value) > 18:
                raise MalformedStream("an event number that is not a number")
            self._number = int(value)


@dataclasses.dataclass(frozen=True, slots=True)
class StreamLimits:
    """Times in seconds: of silence until the connection is made anew, and until the daemon counts as away."""

    reconnect: float = 35.0
    unreachable: float = 60.0
    connect: float = 10.0
    first_backoff: float = 0.05
    max_backoff: float = 2.0
    # For what a daemon held when the connection was made: one that told how much it is, and one that did not.
    catch_up: float = 5.0
    moment: float = 0.01


class EventStream:
    """The messages of one agent server, each once and in order, over any number of connections.

    One reader. Raises `HarnessError`: `HARNESS_UNREACHABLE` after too long a silence, `HARNESS_STREAM_LOST` when
    messages are gone, `FENCED` when the daemon does not know our token or our server any more.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        headers: Mapping[str, str],
        *,
        clock: Clock,
        limits: StreamLimits | None = None,
    ) -> None:
        self._http = http
        self.reach(url, headers)
        self._clock = clock
        self._limits = limits or StreamLimits()
        self._response: aiohttp.ClientResponse | None = None
        self._parser = Parser()
        self._ready: deque[bytes] = deque()
        self._last = 0
        # What came before its turn, by number; and the last number before the hole that was looked into.
        self._early: dict[int, bytes] = {}
        self._looked_after = -1
        # When the last byte came, when this connection was made, and when the reader went away to work.
        self._heard = self._connected = self._left = clock.monotonic()
        self._reading = False
        # What the daemon said to be its newest message when the connection was made; None when it does not say.
        self._newest: int | None = None
        self._failed: HarnessError | None = None
        # Connections in a row that brought nothing.
        self._failures = 0
        # While true, a hole in the numbers is no loss: nobody needs what was in it.
        self.holes_allowed = False
        # While true, a server that is not there yet is waited for.
        self.starting = False
        self.reconnects = 0

    @property
    def last_number(self) -> int:
        """Number of the newest message received."""
        return self._last

    @property
    def connected(self) -> bool:
        """Whether a connection is open."""
        return self._response is not None

    @property
    def silence(self) -> float:
        """Seconds since the last byte, without the time in which nobody read."""
        return (self._clock.monotonic() if self._reading else self._left) - self._heard

    def reach(self, url: str, headers: Mapping[str, str]) -> None:
        """Connections go there from now on."""
        self._url = url
        self._headers = {**headers, "Accept": "text/event-stream", "Cache-Control": "no-cache"}

    async def connect(self) -> None:
        """Open the connection if there is none, waiting for a daemon that does not answer as long as `read` would."""
        with self._listening():
            if self._response is None:
                await self._connect()

    async def read(self) -> list[bytes]:
        """The next messages, at least one, as JSON text."""
        with self._listening():
            while not self._ready:
                if self._failed is not None:
                    raise self._failed
                if self._response is None:
                    await self._connect()
                await self._read_chunk(self._response)
            return self._take()

    async def read_waiting(self) -> list[bytes]:
        """What the daemon held already when this connection was made, and was not read; nothing when there is no more.

        A daemon that does not say how much that is counts as empty once it has sent nothing for a moment.
        """
        with self._listening():
            while not self._ready and self._failed is None:
                if self._early and self._response is None:
                    await self._connect()
                known = self._newest
                if self._response is None or (known is not None and self._last >= known):
                    break
                brief = known is None and not self._early
                try:
                    async with asyncio.timeout(self._limits.moment if brief else self._limits.catch_up):
                        self._received(await self._response.content.readany())
                except (TimeoutError, aiohttp.ClientError, ConnectionError):
                    break
                if not self._early:
                    break
            if self._failed is not None and not self._ready:
                raise self._failed
            return self._take()

    def disconnect(self) -> None:
        """Let go of the connection; the next `read` or `connect` resumes after the last message received."""
        self._drop()
        self._failures = 0
        self._heard = self._left = self._clock.monotonic()

    def drop_connection(self) -> None:
        """Go on over a new connection, also for a reader that waits right now."""
        if self._response is not None:
            self._response.close()

    async def _read_chunk(self, response: aiohttp.ClientResponse | None) -> None:
        assert response is not None
        until = max(self._connected, self._heard) + self._limits.reconnect
        until = min(until, self._heard + self._limits.unreachable)
        error: Exception | None = None
        chunk = b""
        try:
            async with asyncio.timeout(max(0.05, until - self._clock.monotonic())):
                chunk = await response.content.readany()
        except (TimeoutError, aiohttp.ClientError, ConnectionError) as found:
            error = found
        self._received(chunk, error)

    def _received(self, chunk: bytes, error: Exception | None = None) -> None:
        if not chunk:
            self._drop()
            self.reconnects += 1
            logger.info("stream broken", extra={"last": self._last, "error": type(error).__name__ if error else "end"})
            return
        self._heard = self._clock.monotonic()
        self._failures = 0
        try:
            events = self._parser.feed(chunk)
        except MalformedStream as found:
            self._fail(HarnessError("AGENT_PROTOCOL", f"the daemon sent {found}"))
            return
        for event in events:
            self._accept(event)
        if self._early:
            self._look_into_the_hole()

    def _accept(self, event: Event) -> None:
        if event.number is None:
            self._ready.append(event.data)
            return
        if event.number <= self._last:
            return
        if event.number > self._last + 1 and not self.holes_allowed:
            self._early[event.number] = event.data
            return
        if event.number > self._last + 1:
            self._early.clear()
        self._last = event.number
        self._ready.append(event.data)
        while (data := self._early.pop(self._last + 1, None)) is not None:
            self._last += 1
            self._ready.append(data)

    def _look_into_the_hole(self) -> None:
        """Ask for what is missing over a new connection; it is lost when that was done."""
        if self._looked_after == self._last:
            missing = min(self._early) - self._last - 1
            self._fail(HarnessError("HARNESS_STREAM_LOST", f"{missing} messages of the agent were lost"))
            return
        logger.info("messages are missing", extra={"last": self._last, "next": min(self._early)})
        self._looked_after = self._last
        self._drop()

    def _fail(self, error: HarnessError) -> None:
        """End of the stream; what came whole before is still read."""
        self._drop()
        self._failed = error

    async def _connect(self) -> None:
        while True:
            left = self._limits.unreachable - (self._clock.monotonic() - self._heard)
            if left <= 0:
                raise HarnessError(
                    "HARNESS_UNREACHABLE", f"the sandbox sent nothing for {self._limits.unreachable:g} s"
                )
            if self._failures:
                steps = 0 if self.starting else min(self._failures, 10)
                backoff = min(self._limits.first_backoff * 2**steps, self._limits.max_backoff)
                await asyncio.sleep(min(left, backoff * random.uniform(0.5, 1.0)))  # noqa: S311 - spreads reconnects
            # Until it brings a byte, also a connection that was made counts as one that failed.
            self._failures += 1
            if await self._try_to_connect(min(self._limits.connect, max(0.05, left))):
                return

    async def _try_to_connect(self, timeout: float) -> bool:
        headers = dict(self._headers)
        if self._last:
            headers["Last-Event-ID"] = str(self._last)
        response: aiohttp.ClientResponse | None = None
        try:
            # Without a span: one that lasts as long as the agent session tells nothing, and a server that is not there
            # yet is no error.
            with suppress_http_instrumentation():
                async with asyncio.timeout(timeout):
                    response = await self._http.get(
                        self._url,
                        headers=headers,
                        timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeout),
                        read_bufsize=READ_BYTES,
                        allow_redirects=False,
                    )
        except (TimeoutError, aiohttp.ClientError, ConnectionError) as error:
            logger.debug("stream not opened", extra={"error": type(error).__name__})
            return False
        if response.status == 200 and response.content_type == "text/event-stream":
            self._response, self._parser = response, Parser()
            newest = response.headers.get(NEWEST_HEADER, "")
            self._newest = int(newest) if newest.isascii() and newest.isdigit() and len(newest) <= 18 else None
            self._connected = self._clock.monotonic()
            return True
        status = response.status
        response.close()
        if status == 401 or (status in (400, 404) and not self.starting):
            raise HarnessError("FENCED", f"the daemon refused the stream with {status}", fenced=True)
        return False

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """The time that the reader is away is not the daemon's silence."""
        self._heard += self._clock.monotonic() - self._left
        self._reading = True
        try:
            yield
        finally:
            self._reading = False
            self._left = self._clock.monotonic()

    def _take(self) -> list[bytes]:
        ready, self._ready = list(self._ready), deque()
        return ready

    def _drop(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None
