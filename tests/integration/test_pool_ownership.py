"""One pool process owns its sessions: how it says that it lives, what it leaves to the next one, and that another one
drives nothing of it as long as it lives."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from hearth.pool.v1 import pool_pb2, pool_service_pb2
from hearth.session.v1 import session_pb2 as sessions
from services.pool.sealing import new_key
from tests.contract.pool.house import Backend, House, agent_text, eventually, key, summary
from tests.support.processes import ServiceProcess
from tests.support.servers import Servers


@pytest.fixture(scope="module")
def house(servers: Servers, module_postgres_dsn: str, module_valkey_url: str) -> Iterator[House]:
    """Services whose pool the tests end and start again."""
    env = {"HEARTH_SECRET_KEY": new_key(), "HEARTH_SHUTDOWN_GRACE": "12"}
    with House(servers.scratch(), module_postgres_dsn, module_valkey_url, env).running() as found:
        yield found


@pytest_asyncio.fixture
async def backend(house: House) -> AsyncIterator[Backend]:
    """A backend of those."""
    found = Backend(house)
    yield found
    await found.close()


BEAT_EVERY = 5.0


async def replica(backend: Backend) -> pool_pb2.Replica:
    """The one that beats."""
    (found,) = (await backend.pools.ListReplicas(pool_service_pb2.ListReplicasRequest(), timeout=20)).replicas
    return found


@pytest.mark.exhaustive
async def test_w_o01_a_replica_beats_at_once_and_then_steadily_under_one_id(backend: Backend, house: House) -> None:
    first = await replica(backend)
    assert first.HasField("beat_at")

    async def beats_again() -> pool_pb2.Replica | None:
        found = await replica(backend)
        return found if found.beat_at.ToDatetime() > first.beat_at.ToDatetime() else None

    second = await eventually(beats_again, timeout=BEAT_EVERY * 4)
    assert (second.holder, second.address) == (first.holder, house.pool.address)
    # What it says of itself is what it does.
    session = key()
    sent = await backend.send(session, "stream 3000 words at 100/s")

    async def says_so() -> pool_pb2.Replica | None:
        found = await replica(backend)
        return found if found.driving == 1 else None

    assert (await eventually(says_so, timeout=BEAT_EVERY * 4)).holder == first.holder
    await backend.stop(session, sent.started.execution.execution_id)
    await backend.settled(session, sent.started.execution.execution_id)


async def test_w_o01_after_its_end_it_beats_no_more_and_the_next_one_has_another_id(
    backend: Backend, house: House
) -> None:
    before = await replica(backend)
    await house.pool.restart()
    after = await replica(backend)
    assert after.holder != before.holder
    assert after.started_at.ToDatetime() > before.started_at.ToDatetime()


async def test_w_o02_a_second_pool_process_drives_nothing(backend: Backend, house: House) -> None:
    second = ServiceProcess("services.pool", house.directory, {**house.pool.env, "HEARTH_LISTEN": "127.0.0.1:0"})
    session = key()
    sent = await backend.send(session, "stream 60 words at 10/s")
    # It has had every reason to look at the rows that it finds by the time that the turn ends.
    await second.start()
    execution_id = sent.started.execution.execution_id
    assert (await backend.ending(session, execution_id)).HasField("execution_completed")
    assert (await backend.execution(session, execution_id)).epoch == 1
    assert await second.terminate() == 0
    # It is gone in good order, and nobody else had to do with the session.
    found = await backend.session(session)
    assert (found.epoch, found.holder) == (1, (await replica(backend)).holder)


async def test_w_e05_which_session_may_be_loaded_is_settled_with_the_turn(backend: Backend, house: House) -> None:
    session = key()
    done = await backend.run(session, "remember my name is Ada")
    await backend.settled(session, done.execution_id)
    # From the settlement on it is known to whoever drives the session next, even if this process dies now.
    house.pool.kill9()
    await house.pool.start()
    again = await backend.run(session, "what is my name?")
    assert json.loads(summary(again).agent_report_json)["hearth.dev/agent"]["session_loaded"] is True
    assert "Ada" in agent_text(await backend.events(session), again.execution_id)
    # A turn that did not end well settles none, so that of the one before it still counts.
    cut = await backend.send(session, "remember my town is Bern\nstream 3000 words at 50/s")

    async def asked() -> bool:
        found = await backend.execution(session, cut.started.execution.execution_id)
        return found.state == sessions.EXECUTION_STATE_RUNNING

    await eventually(asked)
    house.pool.kill9()
    await house.pool.start()
    assert (await backend.ending(session, cut.started.execution.execution_id)).HasField("execution_lost")
    last = await backend.run(session, "what is my name?")
    assert "Ada" in agent_text(await backend.events(session), last.execution_id)
