"""Many sessions through the real producer: every reader's frames add up to what was said, none is lost."""

from __future__ import annotations

import asyncio

from hearth.producer import Producer, ProducerLimits
from hearth.types.v1 import content_pb2, event_pb2, frame_pb2, session_pb2
from services.chassis.clock import SystemClock
from tests.support import events
from tests.support.relay_reader import StrictReader, reading
from tests.support.relay_stack import RelayStack, relay_stack
from tests.support.servers import Servers

SESSIONS = 12
MESSAGES = 4
WORDS = 25


def message(entity_id: str, text: str) -> event_pb2.Event:
    part = content_pb2.ContentPart(text=content_pb2.TextPart(text=text))
    body = event_pb2.MessageCompleted(message_id=entity_id, role=content_pb2.ROLE_AGENT, content=[part])
    return event_pb2.Event(entity_id=entity_id, message_completed=body)


async def turn(producer: Producer, session: session_pb2.SessionKey, number: int) -> dict[str, str]:
    """One turn; what its messages say."""
    writer = producer.writer(session, events.new_id(), number)
    await writer.event(event_pb2.Event(execution_started=event_pb2.ExecutionStarted(agent="scripted")))
    texts: dict[str, str] = {}
    for position in range(MESSAGES):
        entity = f"{number}-{position}"
        for word in range(WORDS):
            writer.frame(entity, text_delta=frame_pb2.TextDelta(text=f"{word} "))
            texts[entity] = texts.get(entity, "") + f"{word} "
            if word % 5 == 0:
                await asyncio.sleep(0.002)
        writer.event(message(entity, texts[entity]))
    result = await writer.ending(
        event_pb2.Event(execution_completed=event_pb2.ExecutionCompleted(finish_reason="end_turn"))
    )
    assert result.sequence == number * (MESSAGES + 2)
    return texts


async def follow(stack: RelayStack, session: session_pb2.SessionKey, endings: int) -> StrictReader:
    async with reading(stack.channel(), session) as reader:
        await reader.until(lambda: reader.types.count("execution.completed") == endings, timeout=60)
    return reader


async def test_what_is_said_in_many_sessions_arrives_whole(servers: Servers, migrated_dsn: str) -> None:
    async with relay_stack(servers, migrated_dsn) as stack:
        # On a loaded machine the relay may take longer than an event waits for its frames; here nothing may be lost.
        limits = ProducerLimits(hold=30.0)
        producer = Producer(
            history=stack.channel(stack.history), relay=stack.channel(), clock=SystemClock(), limits=limits
        )
        await producer.start()
        sessions = [events.key() for _ in range(SESSIONS)]
        readers = [asyncio.create_task(follow(stack, session, 2)) for session in sessions]
        await asyncio.sleep(0.5)
        for number in (1, 2):
            said = await asyncio.gather(*(turn(producer, session, number) for session in sessions))
        for reader, texts in zip(await asyncio.gather(*readers), said, strict=True):
            assert reader.gaps == []
            for entity, text in texts.items():
                assert reader.text(entity) == text
        await producer.close(5)


async def test_frames_of_an_execution_that_was_ended_above_its_writer_get_in_no_more(
    servers: Servers, migrated_dsn: str
) -> None:
    """As after a takeover: whoever wrote it may be frozen, and know nothing of it."""
    async with relay_stack(servers, migrated_dsn) as stack:
        frozen, other = (
            Producer(history=stack.channel(stack.history), relay=stack.channel(), clock=SystemClock()) for _ in range(2)
        )
        await frozen.start()
        await other.start()
        session, execution_id = events.key(), events.new_id()
        writer = frozen.writer(session, execution_id, 1)
        await writer.event(event_pb2.Event(execution_started=event_pb2.ExecutionStarted(agent="scripted")))
        async with reading(stack.channel(), session) as reader:
            writer.frame("m1", text_delta=frame_pb2.TextDelta(text="before"))
            await reader.until_text("m1", "before")
            other.end_frames(session, execution_id, 2)
            async with asyncio.timeout(20):
                while not writer.refused.done():
                    writer.frame("m1", text_delta=frame_pb2.TextDelta(text="."))
                    await asyncio.sleep(0.01)
            refusal = writer.refused.result()
            assert (refusal.reason, refusal.by, refusal.current_epoch) == ("STALE_EPOCH", "relay", 2)
        await frozen.close(1)
        await other.close(1)
