"""Subscribe: everything after a cursor, then `ready`, then live, for each way to begin."""

from __future__ import annotations

import asyncio

import pytest

from hearth.types.v1 import session_pb2
from tests.contract.relay.conftest import Services
from tests.support import events
from tests.support.relay_reader import reading
from tests.support.relay_turns import append


async def test_from_the_beginning(services: Services) -> None:
    turn = services.turn()
    await turn.start()
    await append(services.history, turn.session, *(events.custom() for _ in range(5)))
    async with reading(services.relay, turn.session) as reader:
        await reader.until_ready()
        ready = reader.of_kind("ready")[0].ready
        assert (ready.through, ready.head, ready.oldest, ready.cursor) == (6, 6, 1, reader.events[-1].cursor)
        assert reader.kinds() == ["event"] * 6 + ["ready"]
        await append(services.history, turn.session, events.custom())
        await reader.until_sequence(7)


async def test_after_a_cursor(services: Services) -> None:
    session = events.key()
    await append(services.history, session, *(events.custom() for _ in range(5)))
    async with reading(services.relay, session) as first:
        await first.until_ready()
    for known in first.events:
        for cursor in (known.cursor, session_pb2.Cursor(sequence=known.cursor.sequence)):
            async with reading(services.relay, session, after=cursor) as reader:
                await reader.until_ready()
                assert reader.sequences == list(range(cursor.sequence + 1, 6))
                assert reader.of_kind("ready")[0].ready.cursor == first.events[-1].cursor


async def test_the_tail_begins_with_what_comes_from_now_on(services: Services) -> None:
    session = events.key()
    await append(services.history, session, *(events.custom() for _ in range(3)))
    async with reading(services.relay, session, tail=True) as reader:
        await reader.until_ready()
        assert reader.of_kind("ready")[0].ready.through == 3
        assert reader.events == []
        await append(services.history, session, events.custom())
        await reader.until_sequence(4)
        await reader.reconnect()
        await append(services.history, session, events.custom())
        await reader.until_sequence(5)
        assert reader.sequences == [4, 5]


async def test_a_session_that_nobody_knows_waits_for_its_first_event(services: Services) -> None:
    turn = services.turn()
    async with (
        reading(services.relay, turn.session) as reader,
        reading(services.relay, turn.session, tail=True) as tail,
    ):
        for each in (reader, tail):
            await each.until_ready()
            assert each.of_kind("ready")[0].ready.cursor == session_pb2.Cursor()
        await turn.start()
        await turn.say("m", "hello", " world")
        for each in (reader, tail):
            await each.until_sequence(1)
            await each.until_text("m", "hello world")
            assert each.cursor is not None
            assert each.cursor.log_id
            await each.reconnect()
            await each.until_ready()


async def test_events_only(services: Services) -> None:
    turn = services.turn()
    async with reading(services.relay, turn.session, events_only=True) as reader:
        await reader.until_ready()
        await turn.start()
        await turn.say("m", "hello")
        turn.lose(3)
        await turn.complete("m")
        await turn.end()
        await reader.until_type("execution.completed")
        assert set(reader.kinds()) <= {"event", "ready", "heartbeat"}


async def test_the_frames_of_a_turn_add_up_to_its_message(services: Services) -> None:
    turn = services.turn()
    async with reading(services.relay, turn.session) as reader:
        await reader.until_ready()
        await turn.start()
        for word in ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]:
            await turn.say("m", word, " ")
        await turn.complete("m")
        await turn.end()
        await reader.until_type("execution.completed")
        assert reader.text("m") == turn.texts["m"]
        assert reader.gaps == []
        assert len(reader.frames) == turn.next


async def test_an_event_comes_byte_for_byte_and_large_ones_too(services: Services) -> None:
    session = events.key()
    small, large, middle = events.custom(10), events.custom(900_000), events.custom(60_000)
    async with reading(services.relay, session) as reader:
        await reader.until_ready()
        await append(services.history, session, small, large, middle)
        await reader.until_sequence(3)
    async with reading(services.relay, session) as replayed:
        await replayed.until_ready()
    for each in (reader, replayed):
        assert [item.event for item in each.events] == [small, large, middle]


async def test_a_quiet_stream_has_heartbeats(services: Services) -> None:
    session = events.key()
    await append(services.history, session, events.custom())
    async with reading(services.relay, session) as reader:
        await reader.until(lambda: len(reader.of_kind("heartbeat")) >= 2, timeout=5 + 3 * services.heartbeat)
        assert {(item.heartbeat.through, item.heartbeat.head) for item in reader.of_kind("heartbeat")} == {(1, 1)}


async def test_a_long_log_is_replayed_whole(services: Services) -> None:
    session = events.key()
    for _ in range(8):
        await append(services.history, session, *(events.custom(1_000) for _ in range(900)))
    async with reading(services.relay, session) as reader:
        await reader.until_ready()
        assert len(reader.events) == 7_200


@pytest.mark.parametrize("readers", [20])
async def test_joining_while_events_are_committed(services: Services, readers: int) -> None:
    """Who joins at any moment sees every event once, in order, whether it comes from history or the bus."""
    turn = services.turn()
    await turn.start()
    total = 150

    async def produce() -> None:
        for number in range(total):
            await turn.say(f"m{number}", "some", " text")
            await turn.complete(f"m{number}")

    async def follow(delay: float, *, tail: bool) -> None:
        await asyncio.sleep(delay)
        async with reading(services.relay, turn.session, tail=tail) as reader:
            await reader.until_sequence(total + 1, timeout=60)
            if not tail:
                assert reader.sequences == list(range(1, total + 2))

    async with asyncio.TaskGroup() as group:
        group.create_task(produce())
        for number in range(readers):
            group.create_task(follow(number * 0.03, tail=number % 4 == 3))
