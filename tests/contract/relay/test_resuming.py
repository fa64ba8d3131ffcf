"""H2, H3: from every place in a stream a reader can resume, at any replica, and gets the rest and nothing twice."""

from __future__ import annotations

import itertools

import pytest

from hearth.types.v1 import session_pb2
from tests.checkers import check_reader
from tests.contract.relay.conftest import Services
from tests.support import events
from tests.support.recording import Connection, events_in
from tests.support.relay_reader import StrictReader, reading
from tests.support.relay_turns import Turn, append


async def two_turns(services: Services) -> Turn:
    """A turn that is over, facts, and a turn that runs, with a message that is not complete."""
    first = services.turn()
    await first.start()
    await first.say("a", "one", " two")
    await first.complete("a")
    await first.end()
    await append(services.history, first.session, events.input_queued(), events.custom())
    turn = services.turn(first.session, epoch=2)
    await turn.start()
    await turn.say("b", "three", " four")
    await turn.complete("b")
    await turn.begin_tool("t")
    await turn.say("c", "five", " six")
    await turn.complete_tool("t")
    await turn.say("d", "seven")
    return turn


@pytest.mark.parametrize("events_only", [False, True])
async def test_from_every_cursor_the_rest_and_only_the_rest(services: Services, events_only: bool) -> None:
    turn = await two_turns(services)
    async with reading(services.relay, turn.session, events_only=events_only) as whole:
        await whole.until_ready()
    cursors = [session_pb2.Cursor(), *(item.cursor for item in whole.events)]
    for relay, cursor in itertools.product(services.relays, cursors):
        async with reading(relay, turn.session, after=cursor, events_only=events_only) as reader:
            await reader.until_ready()
        assert [item.cursor for item in reader.events] == cursors[cursor.sequence + 1 :]
        ready = reader.of_kind("ready")[0].ready
        assert (ready.through, ready.cursor) == (len(cursors) - 1, cursors[-1])
        if not events_only:
            assert reader.text("c") == "five six"
            assert reader.text("d") == "seven"
            assert reader.gaps == []


async def test_a_reader_that_broke_off_behind_any_item(services: Services) -> None:
    """What it had up to there and what it gets on its next connection are together one sound stream."""
    turn = await two_turns(services)
    async with reading(services.relay, turn.session) as live:
        await live.until_ready()
        await turn.say("d", " eight")
        await turn.complete("d")
        await turn.say("e", "nine")
        await turn.complete("e")
        await live.until_sequence(await turn.end())
    items = live.items
    for place in range(len(items) + 1):
        had = items[:place]
        cursor = next((item.cursor for item in reversed(list(events_in(had)))), session_pb2.Cursor())
        relay = services.relays[place % len(services.relays)]
        async with reading(relay, turn.session, after=cursor) as resumed:
            await resumed.until_ready()
        check_reader([Connection(session_pb2.Cursor(), had), *resumed.recording])
        assert [*events_in(had), *resumed.events] == live.events


async def test_who_resumes_at_the_head_gets_what_comes_next(services: Services) -> None:
    session = events.key()
    await append(services.history, session, events.custom())
    async with reading(services.relay, session) as reader:
        for sequence in range(2, 8):
            await reader.until_ready()
            reader.use(services.relays[sequence % len(services.relays)])
            await reader.reconnect()
            await append(services.history, session, events.custom())
            await reader.until_sequence(sequence)
    assert reader.sequences == list(range(1, 8))


async def test_events_that_come_while_a_reader_is_away_are_there_when_it_is_back(services: Services) -> None:
    turn = services.turn()
    await turn.start()
    async with reading(services.relay, turn.session) as reader, reading(services.other_relay, turn.session) as other:
        for number in range(12):
            await reader.until_ready()
            await reader.disconnect()
            await turn.say(f"m{number}", "a", "b")
            sequence = await turn.complete(f"m{number}")
            await turn.say(f"m{number + 1}", "begun ")
            reader.use(services.relays[number % len(services.relays)])
            reader.connect()
            await reader.until_sequence(sequence)
        await other.until_sequence(sequence)
    assert reader.events == other.events


async def test_the_head_is_information(services: Services) -> None:
    """A reader that is far behind is told the head, and where it stands itself; only from there it can resume."""
    session = events.key()
    for _ in range(6):
        await append(services.history, session, *(events.custom(1_000) for _ in range(500)))
    async with reading(services.relay, session) as reader:
        # It takes the first response and no more, so that its replay is not over while the log grows.
        reader.pause()
        await reader.until(lambda: reader.items)
        await append(services.history, session, *(events.custom() for _ in range(50)))
        async with reading(services.other_relay, session, tail=True) as watcher:
            await watcher.until_ready()
            await append(services.history, session, *(events.custom() for _ in range(50)))
            await watcher.until_sequence(3_100)
        reader.go_on()
        await reader.until_ready()
        told = reader.of_kind("ready")[0].ready
        await reader.disconnect()
        assert told.head > told.through == _last_before_ready(reader)
        async with reading(services.other_relay, session, after=told.cursor) as resumed:
            await resumed.until_ready()
            assert resumed.sequences == list(range(told.through + 1, 3_101))


def _last_before_ready(reader: StrictReader) -> int:
    before = itertools.takewhile(lambda item: not item.HasField("ready"), reader.items)
    return [found.cursor.sequence for found in events_in(before)][-1]
