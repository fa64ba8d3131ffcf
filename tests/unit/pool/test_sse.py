"""The event stream of a daemon: cutting bytes into messages, and following them over connections that break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from services.chassis.clock import SystemClock
from services.pool.harness.port import HarnessError
from services.pool.harness.sse import Event, EventStream, MalformedStream, Parser, StreamLimits

QUICK = StreamLimits(reconnect=0.2, unreachable=0.5, connect=0.2, first_backoff=0.01, max_backoff=0.05, moment=0.2)


def test_a_message_ends_with_an_empty_line() -> None:
    parser = Parser()
    assert parser.feed(b'event: message\nid: 7\ndata: {"a":1}\n') == []
    assert parser.feed(b"\nevent: mess") == [Event(7, b'{"a":1}')]


def test_comments_and_unknown_fields_are_no_messages() -> None:
    assert Parser().feed(b": heartbeat\n\nretry: 5\nfoo\n\nid:3\ndata:x\n\n") == [Event(3, b"x")]


def test_data_over_several_lines_is_joined_and_every_line_end_counts() -> None:
    assert Parser().feed(b"data: a\r\ndata: b\rdata:  c\n\n") == [Event(None, b"a\nb\n c")]


def test_a_number_holds_for_its_own_message_only() -> None:
    assert Parser().feed(b"id: 1\ndata: a\n\ndata: b\n\n") == [Event(1, b"a"), Event(None, b"b")]


def test_long_lines_pass_and_endless_ones_do_not() -> None:
    long = b"x" * 3_000_000
    assert Parser().feed(b"data: " + long + b"\n\n") == [Event(None, long)]
    parser = Parser(limit=100)
    for _ in range(5):
        parser.feed(b"x" * 20)
    with pytest.raises(MalformedStream, match="100 bytes"):
        parser.feed(b"x")


def test_a_message_of_lines_without_end_does_not_pass() -> None:
    with pytest.raises(MalformedStream, match="message of more than 1000 bytes"):
        Parser(limit=1000).feed(b"data: x\n" * 1000)
    with pytest.raises(MalformedStream, match="message of more than 1000 bytes"):
        Parser(limit=1000).feed(b"data\n" * 2000)
    assert Parser(limit=1000).feed(b"data: x\n\n" * 1000) == [Event(None, b"x")] * 1000
    assert Parser().feed(b"data\n\ndata:\ndata\n\n") == [Event(None, b""), Event(None, b"\n")]


@pytest.mark.parametrize("number", [b"one", b"-1", b"1.5", b"", b"9" * 19])
def test_numbers_must_be_numbers(number: bytes) -> None:
    with pytest.raises(MalformedStream):
        Parser().feed(b"id: " + number + b"\n")


@given(st.lists(st.integers(1, 40), max_size=30), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_where_the_bytes_are_cut_makes_no_difference(cuts: list[int], end: bytes) -> None:
    lines = [b": hi", b"", b"event: message", b"id: 1", b'data: {"t":"\xc3\xa9"}', b"", b"id: 2", b"data: b", b""]
    content = end.join(lines) + end
    parser, found, at = Parser(), [], 0
    for cut in [*cuts, len(content)]:
        found += parser.feed(content[at : at + cut])
        at += cut
    assert found == [Event(1, b'{"t":"\xc3\xa9"}'), Event(2, b"b")]


# Following a stream. The server here only plays back bytes: each connection gets the next of them.


class Wire:
    """Answers each connection with the next thing in `plan`: a status, or the bytes to send (`None` = stay silent)."""

    def __init__(self, *plan: int | list[bytes | None]) -> None:
        self._plan = list(plan)
        self.asked: list[str | None] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.headers.get("Last-Event-ID"))
        step = self._plan.pop(0) if self._plan else 503
        if isinstance(step, int):
            return web.Response(status=step)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for content in step:
            if content is None:
                await asyncio.sleep(3600)
            else:
                await response.write(content)
        assert request.transport is not None
        request.transport.close()
        return response


@asynccontextmanager
async def follow(wire: Wire, *, starting: bool = False) -> AsyncIterator[EventStream]:
    app = web.Application()
    app.router.add_get("/stream", wire.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.05)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    wire.url = f"http://127.0.0.1:{runner.addresses[0][1]}/stream"
    try:
        async with aiohttp.ClientSession() as http:
            stream = EventStream(http, wire.url, {"Authorization": "Bearer t"}, clock=SystemClock(), limits=QUICK)
            stream.starting = starting
            yield stream
            stream.disconnect()
    finally:
        await runner.cleanup()


def message(number: int) -> bytes:
    return f"event: message\nid: {number}\ndata: m{number}\n\n".encode()


async def read(stream: EventStream, count: int) -> list[bytes]:
    found: list[bytes] = []
    async with asyncio.timeout(5):
        while len(found) < count:
            found += await stream.read()
    return found


async def fails(stream: EventStream) -> HarnessError:
    with pytest.raises(HarnessError) as error:
        await read(stream, 100)
    return error.value


async def test_it_goes_on_where_the_connection_broke() -> None:
    wire = Wire([message(1), message(2) + message(3)[:20]], [message(3), message(4)])
    async with follow(wire) as stream:
        assert await read(stream, 4) == [b"m1", b"m2", b"m3", b"m4"]
    assert wire.asked[:2] == [None, "2"]


async def test_what_comes_again_is_taken_once() -> None:
    wire = Wire([message(1), message(2)], [message(1), message(2), message(3)])
    async with follow(wire) as stream:
        assert await read(stream, 3) == [b"m1", b"m2", b"m3"]


async def test_a_hole_is_a_loss_once_a_second_connection_has_it_too_and_what_came_before_it_is_read_first() -> None:
    wire = Wire([message(1) + message(2) + message(5)], [message(5) + message(6)])
    async with follow(wire) as stream:
        assert await read(stream, 2) == [b"m1", b"m2"]
        error = await fails(stream)
        assert (error.reason, error.fenced) == ("HARNESS_STREAM_LOST", False)
        assert "2 messages" in str(error)
        assert (await fails(stream)).reason == "HARNESS_STREAM_LOST", "and it stays one"
    assert wire.asked == [None, "2"]


async def test_the_first_message_may_be_missing_too() -> None:
    async with follow(Wire([message(2)], [message(2)])) as stream:
        assert (await fails(stream)).reason == "HARNESS_STREAM_LOST"


async def test_what_the_daemon_left_out_and_kept_is_asked_for() -> None:
    first = [message(2), None]
    again: list[bytes | None] = [message(1) + message(2) + message(4), None]
    wire = Wire(first, again, [message(3) + message(4) + message(5), None])
    async with follow(wire) as stream:
        assert await read(stream, 5) == [b"m1", b"m2", b"m3", b"m4", b"m5"]
    assert wire.asked == [None, None, "2"]


async def test_numbers_that_only_come_in_another_order_are_no_hole() -> None:
    wire = Wire([message(1) + message(3) + message(4) + message(2), None])
    async with follow(wire) as stream:
        assert await read(stream, 4) == [b"m1", b"m2", b"m3", b"m4"]
    assert len(wire.asked) == 1


async def test_what_waits_is_read_over_a_hole() -> None:
    wire = Wire([message(1), None], [message(3), None], [message(2) + message(3), None])
    async with follow(wire) as stream:
        await read(stream, 1)
        stream.disconnect()
        await stream.connect()
        assert await stream.read_waiting() == [b"m2", b"m3"]
        assert await stream.read_waiting() == []


async def test_holes_that_matter_to_nobody() -> None:
    async with follow(Wire([message(5), message(6)])) as stream:
        stream.holes_allowed = True
        assert await read(stream, 2) == [b"m5", b"m6"]


async def test_silence_makes_a_new_connection_and_then_an_end() -> None:
    wire = Wire([message(1), None], [None], [None], [None])
    async with follow(wire) as stream:
        await read(stream, 1)
        started = asyncio.get_running_loop().time()
        assert (await fails(stream)).reason == "HARNESS_UNREACHABLE"
        assert 0.4 < asyncio.get_running_loop().time() - started < 1.5
    assert 2 <= len(wire.asked) <= 4


async def test_heartbeats_keep_a_connection() -> None:
    beats: list[bytes | None] = [message(1)]

    class Beating(Wire):
        async def answer(self, request: web.Request) -> web.StreamResponse:
            self.asked.append(request.headers.get("Last-Event-ID"))
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for _ in range(15):
                await response.write(b": heartbeat\n\n")
                await asyncio.sleep(0.05)
            await response.write(message(1))
            await asyncio.sleep(3600)
            return response

    wire = Beating(beats)
    async with follow(wire) as stream:
        assert await read(stream, 1) == [b"m1"]
    assert len(wire.asked) == 1


async def test_a_reader_that_is_busy_is_not_silence() -> None:
    wire = Wire([message(1), None], [None])
    async with follow(wire) as stream:
        await read(stream, 1)
        away = 0.6
        await asyncio.sleep(away)
        assert stream.silence < away
        reading = asyncio.create_task(stream.read())
        await asyncio.sleep(0)
        assert stream.silence < away
        assert len(wire.asked) == 1
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


@pytest.mark.parametrize("status", [400, 401, 404])
async def test_a_daemon_that_forgot_us_is_a_fence(status: int) -> None:
    async with follow(Wire([message(1)], status)) as stream:
        await read(stream, 1)
        error = await fails(stream)
        assert (error.reason, error.fenced) == ("FENCED", True)


async def test_a_server_that_is_being_made_is_waited_for() -> None:
    async with follow(Wire(404, 404, [message(1)]), starting=True) as stream:
        assert await read(stream, 1) == [b"m1"]


async def test_a_token_that_is_refused_is_a_fence_from_the_start() -> None:
    async with follow(Wire(401), starting=True) as stream:
        assert (await fails(stream)).fenced


async def test_other_answers_are_tried_again() -> None:
    async with follow(Wire(502, 429, [message(1)], 503, [message(2)])) as stream:
        assert await read(stream, 2) == [b"m1", b"m2"]


async def test_connections_that_end_at_once_do_not_spin() -> None:
    wire = Wire(*([[]] * 1000))
    async with follow(wire) as stream:
        assert (await fails(stream)).reason == "HARNESS_UNREACHABLE"
    assert len(wire.asked) < 50


async def test_a_parked_stream_resumes_after_the_last_message_however_long_it_was_parked() -> None:
    wire = Wire([message(1), None], [message(2)])
    async with follow(wire) as stream:
        await read(stream, 1)
        stream.disconnect()
        parked = stream.connected
        await asyncio.sleep(0.7)
        await stream.connect()
        assert (parked, stream.connected) == (False, True)
        assert await read(stream, 1) == [b"m2"]
    assert wire.asked == [None, "1"]


async def test_nobody_there() -> None:
    async with aiohttp.ClientSession() as http:
        stream = EventStream(http, "http://127.0.0.1:9/stream", {}, clock=SystemClock(), limits=QUICK)
        assert (await fails(stream)).reason == "HARNESS_UNREACHABLE"


async def test_a_stream_of_nonsense_is_none_of_the_protocol() -> None:
    async with follow(Wire([message(1) + b"id: x\n"])) as stream:
        assert (await fails(stream)).reason == "AGENT_PROTOCOL"
