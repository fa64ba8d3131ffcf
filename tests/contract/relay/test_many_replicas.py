"""Several relays serve one session: a producer may use any of them, and readers of all see the same."""

from __future__ import annotations

import asyncio

from hearth.relay.v1 import relay_pb2
from tests.contract.relay.conftest import Services
from tests.support.relay_reader import reading
from tests.support.relay_turns import Turn, publish


async def test_readers_of_two_relays_see_what_a_producer_gives_to_either(services: Services) -> None:
    first, second = services.relay, services.other_relay
    turn = services.turn()
    async with reading(first, turn.session) as one, reading(second, turn.session) as other:
        await one.until_ready()
        await other.until_ready()
        await turn.start()
        for number in range(40):
            frames = turn.frames("m", f"{number} ", "x ")
            await publish((first, second)[number % 2], turn.batch(frames))
        # A retry that arrives at the other relay is known there.
        await publish(second, turn.batch(frames))
        async with reading(second, turn.session) as late:
            await late.until_ready()
            assert late.text("m") == turn.texts["m"]
        await turn.complete("m")
        await turn.end()
        for reader in (one, other):
            await reader.until_type("execution.completed")
            assert reader.text("m") == turn.texts["m"]
            assert reader.gaps == []
    assert one.sequences == other.sequences == [1, 2, 3]


async def test_a_reader_moves_between_relays_by_its_cursor(services: Services) -> None:
    turn = services.turn()

    async def produce(turn: Turn) -> None:
        await turn.start()
        for number in range(60):
            await turn.say(f"m{number}", "some", " text")
            await turn.complete(f"m{number}")

    producing = asyncio.create_task(produce(turn))
    async with reading(services.relay, turn.session) as reader:
        seen = 0
        while seen < 61:
            await reader.until_sequence(min(61, seen + 7), timeout=30)
            seen = reader.sequences[-1]
            reader.use(services.relays[len(reader.recording) % len(services.relays)])
            await reader.reconnect()
    await producing
    assert reader.sequences == list(range(1, 62))
    assert len(reader.recording) > 2


async def test_who_is_fenced_at_one_relay_is_fenced_at_all(services: Services) -> None:
    old = services.turn()
    await publish(services.relay, old.batch(old.frames("m", "a")))
    new = services.turn(old.session, epoch=2)
    await publish(services.other_relay, new.batch(new.frames("n", "b")))
    for relay in services.relays:
        (result,) = await publish(relay, old.batch(old.frames("m", "c")))
        assert result.outcome == relay_pb2.PUBLISH_OUTCOME_FENCED
        assert (result.current.execution_id, result.current.epoch) == (new.run.execution_id, 2)


async def test_a_conflict_is_one_at_all_relays(services: Services) -> None:
    turn = services.turn()
    await publish(services.relay, turn.batch(turn.frames("m", "a", "b")))
    turn.next -= 1
    (result,) = await publish(services.other_relay, turn.batch(turn.frames("m", "other")))
    assert (result.outcome, result.through) == (relay_pb2.PUBLISH_OUTCOME_CONFLICT, 1)


async def test_a_takeover_seen_through_two_relays(services: Services) -> None:
    turn = services.turn()
    async with reading(services.relay, turn.session) as one, reading(services.other_relay, turn.session) as other:
        for reader in (one, other):
            await reader.until_ready()
        await turn.start()
        await turn.say("m", "old", " text")
        for reader in (one, other):
            await reader.until_text("m", "old text")
        again = turn.again(2)
        await publish(services.other_relay, again.batch(again.frames("m", "new")))
        await again.complete("m")
        for reader in (one, other):
            await reader.until_type("message.completed")
            assert [item.reset.epoch for item in reader.of_kind("reset")] == [2]
            assert reader.gaps == []
