"""P1, P2: a live agent takes the next turn only where all about it fits; whatever does not costs a cold start."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

from hearth.pool.v1 import pool_pb2, pool_service_pb2
from hearth.sandbox.v1 import sandbox_pb2, sandbox_service_pb2
from hearth.session.v1 import session_pb2 as sessions
from hearth.types.v1 import content_pb2, event_pb2, session_pb2
from tests.contract.pool.house import Backend, House, agent_text, eventually, key, summary
from tests.contract.pool.refusals import refused
from tests.support.servers import Servers


def agent_of(event: event_pb2.Event) -> dict[str, Any]:
    """What the agent reported of itself."""
    report: dict[str, dict[str, Any]] = json.loads(summary(event).agent_report_json)
    return report["hearth.dev/agent"]


def hows(event: event_pb2.Event) -> dict[str, str]:
    """How each stage of a turn was done."""
    return {stage.stage: stage.how for stage in summary(event).stages}


async def evict(backend: Backend, session: session_pb2.SessionKey) -> None:
    """Let the agent of a session go."""
    await backend.pools.EvictEntry(pool_service_pb2.EvictEntryRequest(session=session, request_id="evict"), timeout=20)


async def misses(backend: Backend) -> dict[str, int]:
    """Why turns were not warm so far."""
    return dict((await backend.pools.GetPoolStats(pool_service_pb2.GetPoolStatsRequest())).misses_by_reason)


async def test_cold_then_warm_then_restarted(backend: Backend) -> None:
    session = key()
    first = await backend.run(session, "remember my name is Ada")
    second = await backend.run(session, "what is my name?")
    await evict(backend, session)
    third = await backend.run(session, "what is my name?")

    assert [summary(turn).how for turn in (first, second, third)] == ["cold", "warm", "restarted"]
    assert agent_of(second)["pid"] == agent_of(first)["pid"]
    assert agent_of(second)["turns_in_memory"] == 2
    assert agent_of(third)["pid"] != agent_of(first)["pid"]
    assert agent_of(third)["session_loaded"] is True
    assert summary(third).sandbox_id == summary(first).sandbox_id
    assert hows(first) == {"admit": "", "acquire": "created", "open": "new", "first_output": "", "model": ""}
    assert hows(second) == {"admit": "", "acquire": "attached", "open": "continue", "first_output": "", "model": ""}
    assert hows(third)["open"] == "load"
    events = await backend.events(session)
    assert "Ada" in agent_text(events, second.execution_id)
    assert "Ada" in agent_text(events, third.execution_id)


async def test_an_evicted_entry_is_gone_and_its_sandbox_stopped(backend: Backend) -> None:
    session = key()
    nothing = pool_service_pb2.EvictEntryRequest(session=session, request_id="x")
    assert (await refused(backend.pools.EvictEntry(nothing))).reason == "NOT_FOUND"
    await backend.run(session, "hello")
    entry: Any = await backend.idle_entry(session)
    assert entry.turns == 1
    assert entry.HasField("expires_at")
    assert (await backend.session(session)).holder
    await evict(backend, session)
    assert not await backend.running_sandboxes(session)

    async def forgotten() -> bool:
        return not (await backend.session(session)).holder

    await eventually(forgotten)
    sent = await backend.send(session, "sleep 1")
    busy = pool_service_pb2.EvictEntryRequest(session=session, request_id="y")
    assert (await refused(backend.pools.EvictEntry(busy))).reason in {"SESSION_BUSY", "NOT_FOUND"}
    await backend.settled(session, sent.started.execution.execution_id)


async def test_another_config_closes_the_agent(backend: Backend) -> None:
    session = key()
    first = await backend.run(session, "remember my name is Ada")
    before = await misses(backend)
    changed = sessions.SessionSpec(instructions="Be brief.")
    second = await backend.run(session, "what is my name?", spec=changed)
    same = await backend.run(session, "what is my name?", spec=changed)
    kept = await backend.run(session, "what is my name?")
    assert (await misses(backend)).get("config", 0) == before.get("config", 0) + 1
    assert summary(second).how == "restarted"
    assert agent_of(second)["pid"] != agent_of(first)["pid"]
    assert (summary(same).how, summary(kept).how) == ("warm", "warm")
    assert (await backend.session(session)).spec == changed


async def test_w_c05_an_empty_spec_takes_all_back_to_the_defaults(backend: Backend) -> None:
    session = key()
    first = await backend.run(session, "hello", spec=sessions.SessionSpec(instructions="Be brief."))
    second = await backend.run(session, "hello", spec=sessions.SessionSpec())
    third = await backend.run(session, "hello", spec=sessions.SessionSpec(agent="scripted"))
    assert [summary(turn).how for turn in (first, second, third)] == ["cold", "restarted", "warm"]
    assert not (await backend.session(session)).spec.instructions


async def test_another_sandbox_spec_makes_another_sandbox(backend: Backend) -> None:
    session = key()
    first = await backend.run(session, "remember my name is Ada")
    spec = sessions.SessionSpec(sandbox=sandbox_pb2.SandboxSpec(env={"EXTRA": "1"}))
    second = await backend.run(session, "what is my name?", spec=spec)
    assert summary(second).how == "cold"
    assert summary(second).sandbox_id != summary(first).sandbox_id
    # The workspace, and what the agent keeps in it, outlives the sandbox.
    assert hows(second)["open"] == "load"
    assert "Ada" in agent_text(await backend.events(session), second.execution_id)


async def test_a_spec_of_a_queued_input_comes_into_force_with_it(backend: Backend) -> None:
    session = key()
    sent = await backend.send(session, "sleep 1")
    spec = sessions.SessionSpec(instructions="Be brief.")
    await backend.send(session, "hello", spec=spec)
    assert not (await backend.session(session)).spec.instructions
    await backend.settled(session, sent.started.execution.execution_id)

    async def both() -> bool:
        return sum(event.HasField("execution_completed") for event in await backend.events(session)) == 2

    await eventually(both)
    assert (await backend.session(session)).spec == spec


async def test_a_promoted_input_goes_to_the_same_agent(backend: Backend) -> None:
    session = key()
    await backend.send(session, "sleep 0.5")
    for number in range(3):
        await backend.send(session, f"hello {number}")

    async def all_ended() -> list[event_pb2.Event]:
        ended = [event for event in await backend.events(session) if event.HasField("execution_completed")]
        return ended if len(ended) == 4 else []

    ended = await eventually(all_ended)
    assert [summary(event).how for event in ended] == ["cold", "warm", "warm", "warm"]
    assert len({agent_of(event)["pid"] for event in ended}) == 1
    await backend.idle_entry(session)


def user(text: str) -> sessions.TranscriptEntry:
    """A message of the user in a transcript."""
    return sessions.TranscriptEntry(user_message=sessions.TranscriptUserMessage(text=text))


async def test_w_d02_w_d05_a_caller_who_sees_another_conversation_gets_no_warm_agent(backend: Backend) -> None:
    session = key()
    await backend.run(session, "tool probe {}")
    events = await backend.events(session)
    call_id = next(event.tool_completed.tool_call_id for event in events if event.HasField("tool_completed"))
    tool = sessions.TranscriptEntry(tool_call_id=call_id)
    right = sessions.ExpectedTranscript(entries=[user("tool probe {}"), tool])
    second = await backend.run(session, "hello", expected=right)
    tail = sessions.ExpectedTranscript(entries=[user("hello")], tail_only=True)
    third = await backend.run(session, "more", expected=tail)
    wrong = sessions.ExpectedTranscript(entries=[user("tool probe {}"), tool, user("hello there"), user("more")])
    fourth = await backend.run(session, "again", expected=wrong)
    assert [summary(turn).how for turn in (second, third, fourth)] == ["warm", "warm", "restarted"]
    # The log is what readers see, so that is what the agent is told.
    assert hows(fourth)["open"] == "new"


async def test_media_count_by_their_digest(backend: Backend) -> None:
    from hearth.session.v1 import session_service_pb2 as calls

    session = key()
    data = b"\x89PNG..."
    content = [
        content_pb2.ContentPart(text=content_pb2.TextPart(text="look")),
        content_pb2.ContentPart(inline_media=content_pb2.InlineMediaPart(media_type="image/png", data=data)),
    ]
    sent = await backend.sessions.SendInput(calls.SendInputRequest(session=session, request_id="1", content=content))
    await backend.ending(session, sent.started.execution.execution_id)
    digest = hashlib.sha256(b"image/png\0" + data).hexdigest()
    said = sessions.TranscriptUserMessage(text="look", media_digests=[digest])
    expected = sessions.ExpectedTranscript(entries=[sessions.TranscriptEntry(user_message=said)])
    assert summary(await backend.run(session, "hello", expected=expected)).how == "warm"


async def test_an_agent_whose_sandbox_is_gone_costs_a_cold_start(backend: Backend) -> None:
    session = key()
    first = await backend.run(session, "remember my name is Ada")
    await backend.idle_entry(session)
    await backend.sandboxes.DeleteSandbox(
        sandbox_service_pb2.DeleteSandboxRequest(sandbox_id=summary(first).sandbox_id), timeout=20
    )
    second = await backend.run(session, "what is my name?")
    assert summary(second).how == "cold"
    assert "Ada" in agent_text(await backend.events(session), second.execution_id)


async def test_an_agent_that_died_between_turns_costs_a_cold_start(backend: Backend) -> None:
    import psutil

    session = key()
    first = await backend.run(session, "remember my name is Ada")
    await backend.idle_entry(session)
    before = await misses(backend)
    psutil.Process(agent_of(first)["pid"]).kill()
    second = await backend.run(session, "what is my name?")
    assert second.HasField("execution_completed")
    assert agent_of(second)["pid"] != agent_of(first)["pid"]
    assert "Ada" in agent_text(await backend.events(session), second.execution_id)
    assert (await misses(backend)).get("continuation", 0) == before.get("continuation", 0) + 1


async def test_a_run_is_told_its_own_cost_and_not_that_of_its_session(backend: Backend) -> None:
    """Agents tell the sum; after a load nobody knows what of it came before."""
    session, costs = key(), list[int]()
    for turn in range(4):
        costs.append(summary(await backend.run(session, "hello")).usage.cost_micro_usd)
        await backend.idle_entry(session)
        if turn == 1:
            await evict(backend, session)
    assert costs == [250_000, 250_000, 0, 250_000]


async def test_w_e05_whose_record_may_be_loaded_is_kept_with_the_execution(
    backend: Backend, database: asyncpg.Connection[asyncpg.Record]
) -> None:
    session = key()
    first = await backend.run(session, "hello")
    await backend.settled(session, first.execution_id)
    query = (
        "SELECT s.harness_agent, s.harness_session_id, s.harness_execution_id::text, e.agent, e.harness_session_id"
        " FROM pool.session s JOIN pool.execution e ON e.execution_id = s.ended_execution_id"
        " WHERE s.project = $1 AND s.session = $2"
    )
    (row,) = await database.fetch(query, session.project, session.session)
    agent, loaded, execution_id, *of_execution = row
    assert (agent, execution_id) == ("scripted", first.execution_id)
    assert [agent, loaded] == of_execution
    failed = await backend.run(session, "error something broke")
    await backend.settled(session, failed.execution_id)
    (row,) = await database.fetch(query, session.project, session.session)
    assert row[:3] == (None, None, None)


async def test_a_failed_turn_is_not_continued(backend: Backend) -> None:
    session = key()
    await backend.run(session, "remember my name is Ada")
    failed = await backend.run(session, "error something broke")
    assert failed.execution_failed.code == "AGENT_ERROR"
    after = await backend.run(session, "what is my name?")
    assert summary(after).how == "cold"
    # What the agent wrote down of a turn that failed is not trusted: it is told the conversation instead.
    assert hows(after)["open"] == "new"
    assert "Ada" in agent_text(await backend.events(session), after.execution_id)


@pytest.fixture(scope="module")
def short_house(servers: Servers) -> Iterator[House]:
    """Services that keep a warm agent for a moment only."""
    dsn = servers.create_database(migrated=True)
    env = {"HEARTH_LOCAL_WARM_WINDOW": "0.5"}
    found = House(servers.scratch(), dsn, servers.empty_valkey(), env)
    try:
        found.start_blocking()
        yield found
    finally:
        found.stop()
        servers.drop_database(dsn)


@pytest_asyncio.fixture
async def short(short_house: House) -> AsyncIterator[Backend]:
    """A backend of those."""
    found = Backend(short_house)
    yield found
    await found.close()


async def test_the_warm_window_ends_in_a_stopped_sandbox(short: Backend) -> None:
    session = key()
    first = await short.run(session, "remember my name is Ada")

    async def closed() -> bool:
        entries = (await short.pools.ListEntries(pool_service_pb2.ListEntriesRequest())).entries
        return all(entry.session != session for entry in entries)

    await eventually(closed)
    assert not await short.running_sandboxes(session)
    second = await short.run(session, "what is my name?")
    assert summary(second).how == "restarted"
    assert summary(second).sandbox_id == summary(first).sandbox_id


async def test_a_stop_keeps_the_agent_longer(short: Backend) -> None:
    session = key()
    sent = await short.send(session, "stream 1000 words at 50/s")
    execution_id = sent.started.execution.execution_id

    async def asked() -> bool:
        return (await short.execution(session, execution_id)).state == sessions.EXECUTION_STATE_RUNNING

    await eventually(asked)
    await short.stop(session, execution_id)
    entry: Any = await short.idle_entry(session)
    assert entry.state == pool_pb2.ENTRY_STATE_IDLE
    assert entry.expires_at.ToDatetime().timestamp() - entry.used_at.ToDatetime().timestamp() > 300
