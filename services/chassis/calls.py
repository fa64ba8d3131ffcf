"""Outgoing calls: one way to open a channel to another service.

What a channel adds to each call: the bearer token, a deadline (never later than that of the call being served), a
CLIENT span with its context in the metadata. Retries, keepalive and back-off are gRPC's own, set by options.

OpenTelemetry's client interceptors are not used: they never end the span of a call that is cancelled, so its children
on the other side would be orphans, and they replace the call of a stream by a generator that cannot be written to.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, cast

import grpc
import grpc.aio
from opentelemetry import propagate, trace
from opentelemetry.trace import SpanKind

from hearth.channel import channel_of
from hearth.secret import Secret
from hearth.tls import Tls
from services.chassis.deadlines import bounded
from services.chassis.scopes import is_open
from services.chassis.settings import ChassisSettings
from services.chassis.spans import CallSpan
from services.chassis.tls import Watched, client_tls

# How long a call that nobody follows may take when its channel is left for one with other certificates.
_UNFOLLOWED_SECONDS = 10.0

_Metadata = grpc.aio.Metadata | Sequence[tuple[str, str | bytes]] | None


def open_channel(
    address: str,
    settings: ChassisSettings,
    *,
    retries: bool = True,
    tls: Watched[Tls] | None = None,
    server_name: str = "",
) -> grpc.aio.Channel:
    """A channel to `address`, as `hearth.channel.open_channel` takes one; it connects at its first call. Close it when
    done: that cancels its calls.

    A unary call without `timeout` gets `settings.call_timeout`; calls with a stream get none of their own. `retries`:
    gRPC repeats what answers UNAVAILABLE, a few times; without, that is the answer. `tls` is what `client_tls` gave,
    where channels are opened all the time; `server_name` the name in the certificate of the other side, where neither
    the address nor the settings tell it. Raises `StartupError`.
    """
    tls = tls or client_tls(settings)
    given = () if retries else (("grpc.enable_retries", 0),)

    def connect(how: Tls | None) -> grpc.aio.Channel:
        if how is not None and server_name and not how.server_name:
            how = dataclasses.replace(how, server_name=server_name)
        return channel_of(address, how, given)

    return _Channel(_Links(connect, tls), token=settings.token, timeout=settings.call_timeout)


class _Link:
    """A channel of gRPC and the calls that are open on it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.calls: set[grpc.aio.Call] = set()

    def cancel_all(self) -> None:
        """Cancel what is open: a channel closed with a parked reader on it leaks its connection."""
        for call in list(self.calls):
            call.cancel()


class _Links:
    """The channel for the next call. One with other certificates takes its place when they are renewed, since gRPC
    reads those of a channel once; the former one is closed after the last of its calls."""

    def __init__(self, connect: Callable[[Tls | None], grpc.aio.Channel], tls: Watched[Tls] | None) -> None:
        self._connect = connect
        self._tls = tls
        self._shown = tls.current() if tls is not None else None
        self._newest = _Link(connect(self._shown))
        self._former: list[_Link] = []
        self._closing: set[asyncio.Task[None]] = set()

    def newest(self) -> _Link:
        """For a call that begins now."""
        if self._tls is not None and (found := self._tls.current()) is not self._shown:
            self._shown = found
            self._former.append(self._newest)
            self._newest = _Link(self._connect(found))
            self._close_idle()
        return self._newest

    def ended(self, link: _Link, call: grpc.aio.Call) -> None:
        """A call on a link is over."""
        link.calls.discard(call)
        if self._former and not link.calls:
            self._close_idle()

    async def close(self, grace: float | None) -> None:
        """All of them."""
        links = [*self._former, self._newest]
        if not grace:
            for link in links:
                link.cancel_all()
        await asyncio.gather(*(link.channel.close(grace) for link in links), *self._closing)

    def _close_idle(self) -> None:
        for link in [link for link in self._former if not link.calls]:
            self._former.remove(link)
            # Time for those that are not followed, as health checks.
            task = asyncio.create_task(link.channel.close(_UNFOLLOWED_SECONDS))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


class _Outgoing:
    """What is added to each call of one channel."""

    def __init__(self, token: Secret, links: _Links) -> None:
        self._token = token
        self.links = links

    def call(
        self,
        method: str,
        metadata: _Metadata,
        start: Callable[[grpc.aio.Metadata], Any],
        link: _Link,
        *,
        stream: bool,
    ) -> Any:
        """Start a call on `link` with `start(metadata)` and follow it to its end."""
        sent = grpc.aio.Metadata(*cast("Any", metadata or ()))
        if self._token:
            sent.add("authorization", f"Bearer {self._token.reveal()}")
        if is_open(method):
            return start(sent)
        span = CallSpan(method, SpanKind.CLIENT, stream=stream)
        carrier: dict[str, str] = {}
        propagate.inject(carrier, context=trace.set_span_in_context(span.span))
        for key, value in carrier.items():
            sent.add(key, value)
        try:
            call: grpc.aio.Call = start(sent)
        except BaseException:
            span.finish(grpc.StatusCode.INTERNAL)
            raise
        link.calls.add(call)
        call.add_done_callback(lambda _: self._done(call, link, span))
        return call

    def _done(self, call: grpc.aio.Call, link: _Link, span: CallSpan) -> None:
        self.links.ended(link, call)
        span.finish(_known_code(call))


def _known_code(call: grpc.aio.Call) -> grpc.StatusCode:
    """The code of a call that is done; `code()` is a coroutine that then has nothing to wait for."""
    asked = cast("Any", call.code())
    try:
        asked.send(None)
    except StopIteration as done:
        if isinstance(done.value, grpc.StatusCode):
            return done.value
    finally:
        asked.close()
    return grpc.StatusCode.UNKNOWN


class _MultiCallable:
    """A gRPC multi-callable of any kind, with what the channel adds to each of its calls."""

    def __init__(
        self,
        make: Callable[[grpc.aio.Channel], Any],
        method: str,
        outgoing: _Outgoing,
        *,
        timeout: float | None,
        stream: bool,
    ) -> None:
        self._make, self._method, self._outgoing = make, method, outgoing
        self._timeout, self._stream = timeout, stream
        self._link = outgoing.links.newest()
        self._inner = make(self._link.channel)

    def __call__(self, *request: Any, timeout: float | None = None, metadata: _Metadata = None, **options: Any) -> Any:
        ends = bounded(self._timeout if timeout is None else timeout)
        link = self._outgoing.links.newest()
        if link is not self._link:
            self._link, self._inner = link, self._make(link.channel)

        def start(sent: grpc.aio.Metadata) -> Any:
            return self._inner(*request, timeout=ends, metadata=sent, **options)

        return self._outgoing.call(self._method, metadata, start, link, stream=self._stream)


class _Channel(grpc.aio.Channel):
    """A channel that adds what `_Outgoing` does; the calls it gives out are gRPC's own."""

    def __init__(self, links: _Links, *, token: Secret, timeout: float) -> None:
        self._links = links
        self._timeout = timeout
        self._outgoing = _Outgoing(token, links)

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._calling(lambda channel: channel.unary_unary(method, *args, **kwargs), method, stream=False)

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._calling(lambda channel: channel.unary_stream(method, *args, **kwargs), method, stream=True)

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._calling(lambda channel: channel.stream_unary(method, *args, **kwargs), method, timed=False)

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._calling(lambda channel: channel.stream_stream(method, *args, **kwargs), method, stream=True)

    def _calling(
        self, make: Callable[[grpc.aio.Channel], Any], method: str, *, stream: bool = False, timed: bool = True
    ) -> _MultiCallable:
        timeout = self._timeout if timed and not stream else None
        return _MultiCallable(make, method, self._outgoing, timeout=timeout, stream=stream)

    async def close(self, grace: float | None = None) -> None:
        await self._links.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._links.newest().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._links.newest().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._links.newest().channel.channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        await self.close()
