"""The database behind a session is another one: no reader goes on silently, each is refused by what it knows."""

from __future__ import annotations

import grpc

from services.chassis.errors import from_rpc_error
from tests.support import events
from tests.support.processes import ServiceProcess
from tests.support.relay_reader import reading
from tests.support.relay_stack import relay_stack
from tests.support.relay_turns import append
from tests.support.servers import Servers


async def test_readers_of_a_replaced_log_are_told(servers: Servers, migrated_dsn: str) -> None:
    other_dsn = servers.create_database(migrated=True)
    async with relay_stack(servers, migrated_dsn) as stack:
        session, untouched = events.key(), events.key()
        for each in (session, untouched):
            await append(stack.channel(stack.history), each, events.custom(), events.custom())
        other = ServiceProcess(
            "services.history",
            servers.scratch(),
            {**stack.history.env, "HEARTH_POSTGRES_DSN": other_dsn, "HEARTH_LISTEN": stack.history.address},
        )
        async with (
            reading(stack.channel(), session) as reader,
            reading(stack.channel(), events.key()) as waiting,
            reading(stack.channel(), session, tail=True, events_only=True) as tail,
        ):
            for each_reader in (reader, waiting, tail):
                await each_reader.until_ready()
            stack.history.kill9()
            await other.start()
            try:
                await append(stack.channel(stack.history), session, *(events.custom() for _ in range(3)))
                for each_reader in (reader, tail):
                    await each_reader.until_ended()
                    assert each_reader.error is not None
                    error = from_rpc_error(each_reader.error)
                    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "LOG_REPLACED")
                    # The other log as it was when the relay saw it: still empty, or with what was appended.
                    assert (error.metadata["oldest"], error.metadata["head"]) in {("0", "0"), ("1", "3")}
                # Who knew nothing yet goes on, and so does who begins anew.
                assert not waiting.ended
                async with reading(stack.channel(), session) as anew:
                    await anew.until_ready()
                    assert anew.sequences == [1, 2, 3]
                    await append(stack.channel(stack.history), session, events.custom())
                    await anew.until_sequence(4)
            finally:
                await other.terminate()
    servers.drop_database(other_dsn)
