"""Known failures of systems like this, by code in docs/failures.md: the memory of a relay beside stalled readers."""

from __future__ import annotations

import psutil

from hearth.types.v1 import frame_pb2
from tests.support import events
from tests.support.relay_reader import reading
from tests.support.relay_stack import RelayStack, relay_stack
from tests.support.relay_turns import Turn, append
from tests.support.servers import Servers

MEBIBYTE = 1024 * 1024
# Of frames and of events each; the second amount is far above the bounds of reader, tail and buffer together.
FIRST_MEBIBYTES = 8
THEN_MEBIBYTES = 40


def resident(stack: RelayStack) -> int:
    """Memory of the relay, in bytes."""
    return int(psutil.Process(stack.relay.pid).memory_info().rss)


async def talk(stack: RelayStack, turn: Turn, mebibytes: int) -> int:
    """Say so much in frames that cannot be joined, and in events; the last sequence."""
    custom = frame_pb2.CustomFrame(type="test.example/piece", data=b"x" * 32_000)
    sequence = 0
    for _ in range(mebibytes):
        frames = [frame_pb2.Frame(frame_index=turn.next + place, entity_id="m", custom=custom) for place in range(32)]
        turn.next += 32
        await turn.publish(*frames)
        new = [events.custom(256_000) for _ in range(4)]
        sequence = (await append(stack.channel(stack.history), turn.session, *new))[-1].sequence
    return sequence


async def test_r26_g08_a_stalled_reader_does_not_grow_the_relay(servers: Servers, migrated_dsn: str) -> None:
    async with relay_stack(servers, migrated_dsn) as stack:
        turn = stack.turn()
        await turn.start()
        async with (
            reading(stack.channel(), turn.session) as quick,
            reading(stack.channel(), turn.session) as one,
            reading(stack.channel(), turn.session) as two,
            reading(stack.channel(), turn.session) as three,
        ):
            for reader in (quick, one, two, three):
                await reader.until_ready()
            for stalled in (one, two, three):
                stalled.pause()
            await quick.until_sequence(await talk(stack, turn, FIRST_MEBIBYTES), timeout=60)
            before = resident(stack)
            last = await talk(stack, turn, THEN_MEBIBYTES)
            await quick.until_sequence(last, timeout=60)
            grown = (resident(stack) - before) / MEBIBYTE
            # A third of what one of the stalled readers alone was not given.
            assert grown < 2 * THEN_MEBIBYTES / 3, f"{grown:.0f} MiB"
            for stalled in (one, two, three):
                assert stalled.sequences[-1] < last
                stalled.go_on()
            for stalled in (one, two, three):
                await stalled.until_sequence(last, timeout=60)
