"""H4, as far as a reader sees it: what is acknowledged is there, whole, for everybody, in every way to read."""

from __future__ import annotations

import asyncio

from hearth.types.v1 import event_pb2
from tests.checkers import check
from tests.support import events
from tests.support.history_client import Client
from tests.support.recorder import RawHistory, Recorder
from tests.support.recording import Log


async def test_an_acknowledged_event_is_read_at_once_everywhere(history: Client, other: Client) -> None:
    session = events.key()
    for place in range(1, 13):
        event = events.user_message(f"{place}")
        writer, reader = (history, other) if place % 2 else (other, history)
        assert await writer.accepted(session, event) == [place]
        for client in (reader, writer):
            (head,) = await client.heads(session)
            assert head.head.sequence == place
            assert (await client.snapshot(session, 1)).events[0].event == event
        page = await reader.page(session, (await writer.read(session))[place - 2].cursor if place > 1 else None)
        assert [item.event for item in page.events] == [event]


async def test_whatever_many_producers_were_told_is_true(history: Client, other: Client) -> None:
    recorder = Recorder()
    clients = [RawHistory(client.channel, recorder) for client in (history, other)]
    sessions = [events.key() for _ in range(3)]
    keys = [(session.project, session.session) for session in sessions]
    shared = [events.custom(50) for _ in range(30)]

    async def produce(number: int) -> None:
        for place in range(25):
            client = clients[(number + place) % 2]
            sent: list[event_pb2.Event] = [events.user_message(), shared[(number * 7 + place) % 30]]
            await client.append(keys[number % 3], *sent, atomic=place % 3 == 0)

    await asyncio.gather(*(produce(number) for number in range(12)))
    for key, session in zip(keys, sessions, strict=True):
        recorder.recording.logs[key] = Log(await other.read(session), head=(await history.heads(session))[0])
    looked = check(recorder.recording)
    assert looked["H4"] == 12 * 25 * 2
