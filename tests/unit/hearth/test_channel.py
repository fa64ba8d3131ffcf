"""Channels of the library: the token goes with every kind of call, streams can still be written to, and one address may
stand for several replicas."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from hearth.channel import OPTIONS, open_channel, target, trace_context
from services.chassis.health import Servicer


class Recorder(grpc.GenericRpcHandler):
    """Answers every method; its name says of which kind it is."""

    def __init__(self) -> None:
        self.seen: list[str | bytes | None] = []

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        self.seen.append(dict(details.invocation_metadata or ()).get("authorization"))
        match details.method:
            case "/t/unary_unary":
                return grpc.unary_unary_rpc_method_handler(self._one)
            case "/t/unary_stream":
                return grpc.unary_stream_rpc_method_handler(self._many)
            case "/t/stream_unary":
                return grpc.stream_unary_rpc_method_handler(self._last)
            case _:
                return grpc.stream_stream_rpc_method_handler(self._echo)

    async def _one(self, request: bytes, _context: object) -> bytes:
        return request

    async def _many(self, request: bytes, _context: object) -> AsyncIterator[bytes]:
        yield request

    async def _last(self, requests: AsyncIterator[bytes], _context: object) -> bytes:
        return [request async for request in requests][-1]

    async def _echo(self, requests: AsyncIterator[bytes], _context: object) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request


@pytest_asyncio.fixture
async def server() -> AsyncIterator[tuple[str, Recorder]]:
    recorder = Recorder()
    found = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    found.add_generic_rpc_handlers((recorder,))
    port = found.add_insecure_port("127.0.0.1:0")
    await found.start()
    yield f"127.0.0.1:{port}", recorder
    await found.stop(0)


@pytest.mark.parametrize(("token", "expected"), [("secret", "Bearer secret"), ("", None)])
async def test_the_token_goes_with_every_kind_of_call(
    server: tuple[str, Recorder], token: str, expected: str | None
) -> None:
    address, recorder = server
    async with open_channel(address, token=token) as opened:
        channel: Any = opened
        assert await channel.unary_unary("/t/unary_unary")(b"a", metadata=(("x", "y"),)) == b"a"
        assert [item async for item in channel.unary_stream("/t/unary_stream")(b"b")] == [b"b"]
        stream = channel.stream_unary("/t/stream_unary")()
        await stream.write(b"c")
        await stream.done_writing()
        assert await stream == b"c"
        both = channel.stream_stream("/t/stream_stream")()
        await both.write(b"d")
        assert await both.read() == b"d"
        both.cancel()
    assert recorder.seen == [expected] * 4


def test_a_call_carries_the_span_that_it_is_made_in() -> None:
    assert trace_context() == ()
    context = SpanContext(0xA1, 0xB2, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    with trace.use_span(NonRecordingSpan(context)):
        assert trace_context() == (("traceparent", f"00-{0xA1:032x}-{0xB2:016x}-01"),)


def test_servers_must_not_mistake_our_pings_for_an_attack() -> None:
    options = dict(OPTIONS)
    assert options["grpc.keepalive_time_ms"] >= 30_000


def test_only_calls_that_were_not_answered_are_made_again() -> None:
    (methods,) = json.loads(dict(OPTIONS)["grpc.service_config"])["methodConfig"]
    assert methods["retryPolicy"]["retryableStatusCodes"] == ["UNAVAILABLE", "CANCELLED"]


async def _replica(name: bytes, health: Servicer) -> tuple[grpc.aio.Server, str]:
    async def who(_request: bytes, _context: object) -> bytes:
        return name

    class Named(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
            return grpc.unary_unary_rpc_method_handler(who) if details.method == "/t/who" else None

    found = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    found.add_generic_rpc_handlers((Named(),))
    health_pb2_grpc.add_HealthServicer_to_server(health, found)
    port = found.add_insecure_port("127.0.0.1:0")
    await found.start()
    return found, f"127.0.0.1:{port}"


async def test_calls_go_around_the_replicas_that_serve() -> None:
    healths = [Servicer(), Servicer()]
    for health in healths:
        health.publish({"": health_pb2.HealthCheckResponse.SERVING})
    one, two = await _replica(b"one", healths[0]), await _replica(b"two", healths[1])
    async with open_channel(f"{one[1]}, {two[1]}") as opened:
        channel: Any = opened

        async def answering() -> set[bytes]:
            return {await channel.unary_unary("/t/who")(b"", timeout=10) for _ in range(6)}

        async with asyncio.timeout(20):
            # Not before both are connected.
            while await answering() != {b"one", b"two"}:
                pass
            healths[0].publish({"": health_pb2.HealthCheckResponse.NOT_SERVING})
            while await answering() != {b"two"}:
                pass
            # One that is gone fails no call.
            healths[0].publish({"": health_pb2.HealthCheckResponse.SERVING})
            while await answering() != {b"one", b"two"}:
                pass
            await two[0].stop(0)
            assert await answering() == {b"one"}
    await one[0].stop(0)


async def test_calls_reach_a_replica_that_takes_no_more_watchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.chassis.health.MOST_WATCHERS", 0)
    health = Servicer()
    health.publish({"": health_pb2.HealthCheckResponse.SERVING})
    server, address = await _replica(b"one", health)
    async with open_channel(f"{address},{address}") as opened:
        channel: Any = opened
        assert await channel.unary_unary("/t/who")(b"", timeout=10) == b"one"
    await server.stop(0)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("pool.internal:7400", ("pool.internal:7400", False)),
        ("127.0.0.1:1", ("127.0.0.1:1", False)),
        ("dns:///pool.internal:7400", ("dns:///pool.internal:7400", True)),
        ("127.0.0.1:1,localhost:2", ("ipv4:127.0.0.1:1,127.0.0.1:2", True)),
        ("[::1]:1, [::2]:2", ("ipv6:[::1]:1,[::2]:2", True)),
        ("ipv4:127.0.0.1:1,127.0.0.1:2", ("ipv4:127.0.0.1:1,127.0.0.1:2", False)),
    ],
)
def test_an_address_may_stand_for_several_replicas(address: str, expected: tuple[str, bool]) -> None:
    assert target(address) == expected


@pytest.mark.parametrize("address", ["one.internal:1,two.internal:2", "127.0.0.1,127.0.0.1:2", "127.0.0.1:1,[::1]:2"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="IP"):
        open_channel(address)
