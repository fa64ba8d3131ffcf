"""The tail begins behind everything that was committed before the call, whatever the relay had heard of it."""

from __future__ import annotations

from tests.support import events
from tests.support.processes import ServiceProcess
from tests.support.relay_reader import reading
from tests.support.relay_stack import relay_stack
from tests.support.relay_turns import append
from tests.support.servers import Servers

_NEVER = "3600"


async def test_the_tail_of_a_session_that_is_followed_begins_at_the_head_of_now(
    servers: Servers, migrated_dsn: str
) -> None:
    """The relay hears nothing of what the mute history commits, and does not compare heads by itself."""
    async with relay_stack(
        servers, migrated_dsn, HEARTH_RELAY_HEADS_EVERY=_NEVER, HEARTH_RELAY_HEADS_IDLE_WITHIN=_NEVER
    ) as stack:
        mute = ServiceProcess(
            "services.history",
            servers.scratch(),
            {"HEARTH_POSTGRES_DSN": migrated_dsn, "HEARTH_VALKEY_URL": servers.empty_valkey()},
        )
        await mute.start()
        try:
            session = events.key()
            async with reading(stack.channel(), session) as follower:
                await follower.until_ready()
                # A log that is not known yet, and one that is.
                for sequence in (1, 2):
                    await append(stack.channel(mute), session, events.custom())
                    assert follower.sequences == list(range(1, sequence))
                    async with reading(stack.channel(), session, tail=True) as tail:
                        await tail.until_ready()
                        assert [item.ready.through for item in tail.of_kind("ready")] == [sequence]
                        await follower.until_sequence(sequence)
                        assert tail.events == []
        finally:
            await mute.terminate()
