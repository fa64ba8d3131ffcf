"""H2 through the relay: what was trimmed or deleted is refused with its bounds, and who has it already goes on."""

from __future__ import annotations

import asyncio

import grpc

from hearth.types.v1 import session_pb2
from services.chassis.errors import HearthError, from_rpc_error
from tests.contract.relay.conftest import Services
from tests.support import events
from tests.support.history_client import Client
from tests.support.relay_reader import StrictReader, reading
from tests.support.relay_turns import append


async def ended_with(reader: StrictReader) -> HearthError:
    await reader.until_ended()
    assert reader.error is not None
    return from_rpc_error(reader.error)


async def refusal(services: Services, session: session_pb2.SessionKey, after: session_pb2.Cursor) -> HearthError:
    async with reading(services.other_relay, session, after=after) as reader:
        return await ended_with(reader)


async def test_cursors_below_what_is_kept_are_refused_and_those_above_go_on(services: Services) -> None:
    session = events.key()
    await append(services.history, session, *(events.custom() for _ in range(9)))
    async with reading(services.relay, session) as whole:
        await whole.until_ready()
        await Client(services.history).trim(session, 4)
        cursors = [session_pb2.Cursor(), *(item.cursor for item in whole.events)]
        for cursor in cursors[:4]:
            error = await refusal(services, session, cursor)
            assert (error.code, error.reason) == (grpc.StatusCode.OUT_OF_RANGE, "CURSOR_EXPIRED")
            assert (error.metadata["oldest"], error.metadata["head"]) == ("5", "9")
        for cursor in cursors[4:]:
            async with reading(services.other_relay, session, after=cursor) as reader:
                await reader.until_ready()
                assert reader.sequences == list(range(cursor.sequence + 1, 10))
                assert reader.of_kind("ready")[0].ready.oldest == 5
        # Who follows has what was removed, and does not notice.
        await append(services.history, session, events.custom())
        await whole.until_sequence(10)


async def test_a_log_that_was_trimmed_to_its_head(services: Services) -> None:
    session = events.key()
    await append(services.history, session, *(events.custom() for _ in range(3)))
    async with reading(services.relay, session) as whole:
        await whole.until_ready()
    await Client(services.history).trim(session, 3)
    assert (await refusal(services, session, session_pb2.Cursor())).reason == "CURSOR_EXPIRED"
    async with (
        reading(services.relay, session, tail=True) as tail,
        reading(services.other_relay, session, after=whole.cursor) as resumed,
    ):
        for reader in (tail, resumed):
            await reader.until_ready()
        await append(services.history, session, events.custom())
        for reader in (tail, resumed):
            await reader.until_sequence(4)


async def test_readers_of_a_log_that_is_trimmed_meanwhile(services: Services) -> None:
    """Whoever is behind gets everything or is refused, wherever in its replay the trim finds it."""
    session = events.key()
    for _ in range(4):
        await append(services.history, session, *(events.custom(500) for _ in range(500)))

    async def read(relay: grpc.aio.Channel) -> str:
        async with reading(relay, session) as reader:
            await reader.until_ended_or_sequence(2_000)
            return reader.recording[-1].refusal.reason if reader.recording[-1].refusal is not None else ""

    async def trim() -> None:
        for through in range(100, 1_900, 300):
            await Client(services.history).trim(session, through)

    results = await asyncio.gather(*(read(relay) for relay in services.relays for _ in range(6)), trim())
    assert set(results) - {None} <= {"", "CURSOR_EXPIRED"}
    assert (await refusal(services, session, session_pb2.Cursor())).reason == "CURSOR_EXPIRED"


async def test_a_deleted_log_ends_its_readers_and_refuses_new_ones(services: Services) -> None:
    session = events.key()
    turn = services.turn(session)
    await turn.start()
    await turn.say("m", "hello")
    async with (
        reading(services.relay, session) as reader,
        reading(services.other_relay, session, events_only=True) as other,
    ):
        for each in (reader, other):
            await each.until_ready()
        await Client(services.history).delete(session)
        for each in (reader, other):
            error = await ended_with(each)
            assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "LOG_DELETED")
    for cursor in (session_pb2.Cursor(), reader.events[0].cursor):
        error = await refusal(services, session, cursor)
        assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "LOG_DELETED")
    async with reading(services.relay, session, tail=True) as tail:
        assert (await ended_with(tail)).reason == "LOG_DELETED"
