"""What a turn runs in dies in the middle of it: the turn ends in seconds with the right reason, and the session goes on
cold in the same workspace."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import psutil
import pytest

from hearth.sandbox.v1 import sandbox_service_pb2
from hearth.session.v1 import session_pb2 as sessions
from hearth.types.v1 import session_pb2
from tests.contract.pool.house import Backend, House, agent_text, eventually, frozen, key, summary
from tests.support.sandboxes import members

# Far below what the silence of a stream takes to be noticed (60 s), and above what a busy machine makes of 3 s.
SECONDS = 25.0

_AT_WORK = "fs-write kept.txt still here\nstream 100000 words at 20/s"


def is_daemon(process: psutil.Process) -> bool:
    return "services.sandbox.agentd" in " ".join(process.cmdline())


def is_agent(process: psutil.Process) -> bool:
    return "hearth.agents.scripted" in " ".join(process.cmdline())


async def at_work(backend: Backend, session: session_pb2.SessionKey) -> tuple[str, str]:
    """A turn whose agent writes and writes; the ids of execution and sandbox."""
    await backend.run(session, "hello")
    sent = await backend.send(session, _AT_WORK)
    execution_id = sent.started.execution.execution_id

    async def wrote() -> bool:
        return any(event.HasField("tool_completed") for event in await backend.events(session))

    await eventually(wrote)
    (sandbox,) = await backend.running_sandboxes(session)
    return execution_id, sandbox.sandbox_id


def kill(sandbox_id: str, which: Callable[[psutil.Process], bool]) -> None:
    """SIGKILL to the processes of a sandbox that are of one kind."""
    found = [process for process in members(sandbox_id) if which(process)]
    assert found
    for process in found:
        os.kill(process.pid, signal.SIGKILL)


async def goes_on_cold(backend: Backend, session: session_pb2.SessionKey) -> None:
    """The next turn is cold, knows the conversation, and finds the workspace as it was."""
    after = await backend.run(session, "read kept.txt")
    assert after.HasField("execution_completed")
    assert summary(after).how in {"cold", "restarted"}
    assert "still here" in agent_text(await backend.events(session), after.execution_id)
    assert summary(await backend.run(session, "hello")).how == "warm"


@pytest.mark.parametrize(("which", "code"), [(is_agent, "AGENT_EXITED"), (is_daemon, "DAEMON_UNREACHABLE")])
async def test_what_dies_is_seen_in_seconds(
    backend: Backend, which: Callable[[psutil.Process], bool], code: str
) -> None:
    session = key()
    execution_id, sandbox_id = await at_work(backend, session)
    kill(sandbox_id, which)
    ending = await backend.ending(session, execution_id, timeout=SECONDS)
    assert ending.execution_failed.code == code
    events = [event for event in await backend.events(session) if event.execution_id == execution_id]
    cut = [event.message_completed for event in events if event.HasField("message_completed")][-1]
    assert cut.finish_reason == "truncated"

    async def nothing_runs() -> bool:
        return not await backend.running_sandboxes(session)

    await eventually(nothing_runs)
    await goes_on_cold(backend, session)


async def test_a_sandbox_that_an_operator_deletes_is_seen_in_seconds(backend: Backend) -> None:
    session = key()
    execution_id, sandbox_id = await at_work(backend, session)
    await backend.sandboxes.DeleteSandbox(sandbox_service_pb2.DeleteSandboxRequest(sandbox_id=sandbox_id), timeout=20)
    ending = await backend.ending(session, execution_id, timeout=SECONDS)
    assert ending.execution_failed.code in {"HARNESS_UNREACHABLE", "AGENT_EXITED", "DAEMON_UNREACHABLE"}
    await goes_on_cold(backend, session)


async def test_a_frozen_daemon_is_no_dead_one(backend: Backend) -> None:
    """A machine that is busy for some seconds costs nothing."""
    session = key()
    await backend.run(session, "hello")
    sent = await backend.send(session, "stream 40 words at 20/s")
    (sandbox,) = await backend.running_sandboxes(session)
    daemons = [process for process in members(sandbox.sandbox_id) if is_daemon(process)]
    for process in daemons:
        process.suspend()
    await asyncio.sleep(4.0)
    for process in daemons:
        process.resume()
    ending = await backend.ending(session, sent.started.execution.execution_id)
    assert ending.HasField("execution_completed")


async def test_output_that_the_daemon_could_not_keep_is_told_as_lost(backend: Backend, house: House) -> None:
    """A pool that was away for so long that the daemon let go of what it had not read."""
    session = key()
    await backend.run(session, "hello")
    sent = await backend.send(session, "stream 3 words\nsleep 1\nflood 6000 5000\nfs-write done.txt yes\nhang")
    execution_id = sent.started.execution.execution_id

    async def asked() -> bool:
        return (await backend.execution(session, execution_id)).HasField("started_at")

    async def all_said() -> bool:
        return any((house.directory / "sandboxes").rglob("done.txt"))

    await eventually(asked)
    with frozen(house, "pool"):
        await eventually(all_said, timeout=90)
    ending = await backend.ending(session, execution_id)
    assert ending.execution_failed.code == "HARNESS_STREAM_LOST"
    assert summary(ending).manifest.incomplete
    events = [event for event in await backend.events(session) if event.execution_id == execution_id]
    cut = [event.message_completed for event in events if event.HasField("message_completed")]
    assert cut[-1].finish_reason == "truncated"
    assert summary(await backend.run(session, "hello")).how in {"cold", "restarted"}


async def test_an_agent_that_lists_its_commands_has_not_answered(backend: Backend) -> None:
    spec = sessions.SessionSpec()
    spec.limits.first_response.FromMilliseconds(700)
    session = key()
    ending = await backend.run(session, "commands\nhang", spec=spec)
    assert ending.execution_failed.code == "FIRST_RESPONSE_LIMIT"
