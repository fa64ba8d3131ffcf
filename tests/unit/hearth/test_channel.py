"""Channels of the library: the token goes with every kind of call, and streams can still be written to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from hearth.channel import OPTIONS, open_channel


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


def test_servers_must_not_mistake_our_pings_for_an_attack() -> None:
    options = dict(OPTIONS)
    assert options["grpc.keepalive_time_ms"] >= 30_000
    assert '"retryableStatusCodes": ["UNAVAILABLE"]' in options["grpc.service_config"]
