"""H8, L1: who does not keep up loses frames and is told, loses no event, and is nobody else's trouble."""

from __future__ import annotations

import time

from hearth.types.v1 import frame_pb2
from tests.contract.relay.conftest import Services
from tests.support import events
from tests.support.relay_reader import reading
from tests.support.relay_turns import Turn, append

# More than anybody keeps for one reader: the contract says 1 MiB or 4,096 items.
ROUNDS = 12
FRAMES = 16
FRAME_BYTES = 40_000


async def flood(turn: Turn) -> None:
    """Frames that cannot be joined, 640 kB of them."""
    data = b"x" * FRAME_BYTES
    frames = [
        frame_pb2.Frame(
            frame_index=turn.next + place,
            entity_id="t",
            custom=frame_pb2.CustomFrame(type="test.example/progress", data=data),
        )
        for place in range(FRAMES)
    ]
    turn.next += FRAMES
    await turn.publish(*frames)


async def test_a_reader_that_stalls_gets_a_gap_and_every_event(services: Services) -> None:
    turn = services.turn()
    async with (
        reading(services.relay, turn.session) as slow,
        reading(services.relay, turn.session) as quick,
        reading(services.other_relay, turn.session, events_only=True) as other,
    ):
        for reader in (slow, quick, other):
            await reader.until_ready()
        await turn.start()
        slow.pause()
        slowest = 0.0
        for number in range(ROUNDS):
            begun = time.monotonic()
            await flood(turn)
            await turn.say(f"m{number}", "a", "b")
            sequence = await turn.complete(f"m{number}")
            await quick.until_sequence(sequence)
            slowest = max(slowest, time.monotonic() - begun)
        slow.go_on()
        await turn.say("end", "still", " there")
        for reader in (slow, quick):
            await reader.until_text("end", "still there")
        await other.until_sequence(sequence)
    assert quick.gaps == []
    assert len(quick.frames) == turn.next
    assert slow.gaps
    assert slow.sequences == quick.sequences == other.sequences == list(range(1, ROUNDS + 2))
    # A stalled neighbour is no reason to wait; the bound is far above what a round takes.
    assert slowest < 5.0


async def test_many_events_while_a_reader_stalls_are_all_there_afterwards(services: Services) -> None:
    session = events.key()
    async with reading(services.relay, session) as slow, reading(services.other_relay, session) as quick:
        for reader in (slow, quick):
            await reader.until_ready()
        slow.pause()
        sent = []
        for _ in range(24):
            batch = [events.custom(12_000) for _ in range(20)]
            sent += [event.event_id for event in batch]
            await append(services.history, session, *batch)
        await quick.until_sequence(len(sent))
        slow.go_on()
        await slow.until_sequence(len(sent))
        for reader in (slow, quick):
            assert [item.event.event_id for item in reader.events] == sent


async def test_a_reader_that_stalls_in_its_replay(services: Services) -> None:
    turn = services.turn()
    await turn.start()
    for _ in range(8):
        await append(services.history, turn.session, *(events.custom(10_000) for _ in range(90)))
    await turn.say("m", "the beginning")
    async with reading(services.relay, turn.session) as slow:
        slow.pause()
        for number in range(20):
            await turn.say("m", f" {number}", ".")
        sequence = await turn.complete("m")
        await turn.say("n", "next")
        slow.go_on()
        await slow.until_sequence(sequence)
        await slow.until_text("n", "next")
        assert slow.sequences == list(range(1, sequence + 1))
