"""Outgoing calls: one way to open a channel to another service.

What a channel adds to each call: the bearer token, a deadline (never later than that of the call being served), a
CLIENT span with its context in the metadata. Retries, keepalive and back-off are gRPC's own, set by options.

OpenTelemetry's client interceptors are not used: they never end the span of a call that is cancelled, so its children
on the other side would be orphans, and they replace the call of a stream by a generator that cannot be written to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, cast

import grpc
import grpc.aio
from opentelemetry import propagate, trace
from opentelemetry.trace import SpanKind

from hearth.channel import BALANCED_CONFIG, OPTIONS, target
from services.chassis.deadlines import bounded
from services.chassis.scopes import is_open
from services.chassis.settings import ChassisSettings
from services.chassis.spans import CallSpan

_Metadata = grpc.aio.Metadata | Sequence[tuple[str, str | bytes]] | None


def open_channel(address: str, settings: ChassisSettings, *, retries: bool = True) -> grpc.aio.Channel:
    """A channel to `address`, as `hearth.channel.open_channel` takes one; it connects at its first call. Close it when
    done: that cancels its calls.

    A unary call without `timeout` gets `settings.call_timeout`; calls with a stream get none of their own. `retries`:
    gRPC repeats what answers UNAVAILABLE, a few times; without, that is the answer.
    """
    address, balanced = target(address)
    own = {"grpc.service_config": BALANCED_CONFIG} if balanced else {}
    options = list((dict(OPTIONS) | own | ({} if retries else {"grpc.enable_retries": 0})).items())
    if settings.tls_ca_file is not None:
        credentials = grpc.ssl_channel_credentials(root_certificates=settings.tls_ca_file.read_bytes())
        inner = grpc.aio.secure_channel(address, credentials, options=options)
    else:
        inner = grpc.aio.insecure_channel(address, options=options)
    return _Channel(inner, token=settings.token, timeout=settings.call_timeout)


class _Outgoing:
    """What is added to each call of one channel."""

    def __init__(self, token: str) -> None:
        self._authorization = f"Bearer {token}" if token else ""
        self._open: set[grpc.aio.Call] = set()

    def call(
        self,
        method: str,
        metadata: _Metadata,
        start: Callable[[grpc.aio.Metadata], Any],
        *,
        stream: bool,
    ) -> Any:
        """Start a call with `start(metadata)` and follow it to its end."""
        sent = grpc.aio.Metadata(*cast("Any", metadata or ()))
        if self._authorization:
            sent.add("authorization", self._authorization)
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
        self._open.add(call)
        call.add_done_callback(lambda _: self._done(call, span))
        return call

    def cancel_all(self) -> None:
        """Cancel what is open: a channel closed with a parked reader on it leaks its connection."""
        for call in list(self._open):
            call.cancel()

    def _done(self, call: grpc.aio.Call, span: CallSpan) -> None:
        self._open.discard(call)
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

    def __init__(self, inner: Any, method: str, outgoing: _Outgoing, *, timeout: float | None, stream: bool) -> None:
        self._inner, self._method, self._outgoing = inner, method, outgoing
        self._timeout, self._stream = timeout, stream

    def __call__(self, *request: Any, timeout: float | None = None, metadata: _Metadata = None, **options: Any) -> Any:
        ends = bounded(self._timeout if timeout is None else timeout)

        def start(sent: grpc.aio.Metadata) -> Any:
            return self._inner(*request, timeout=ends, metadata=sent, **options)

        return self._outgoing.call(self._method, metadata, start, stream=self._stream)


class _Channel(grpc.aio.Channel):
    """A channel that adds what `_Outgoing` does; the calls it gives out are gRPC's own."""

    def __init__(self, inner: grpc.aio.Channel, *, token: str, timeout: float) -> None:
        self._inner = inner
        self._timeout = timeout
        self._outgoing = _Outgoing(token)

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        inner = self._inner.unary_unary(method, *args, **kwargs)
        return _MultiCallable(inner, method, self._outgoing, timeout=self._timeout, stream=False)

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        inner = self._inner.unary_stream(method, *args, **kwargs)
        return _MultiCallable(inner, method, self._outgoing, timeout=None, stream=True)

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        inner = self._inner.stream_unary(method, *args, **kwargs)
        return _MultiCallable(inner, method, self._outgoing, timeout=None, stream=False)

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        inner = self._inner.stream_stream(method, *args, **kwargs)
        return _MultiCallable(inner, method, self._outgoing, timeout=None, stream=True)

    async def close(self, grace: float | None = None) -> None:
        if not grace:
            self._outgoing.cancel_all()
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        await self.close()
