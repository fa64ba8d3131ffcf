"""Agents that fail end their turn with the right reason in bounded time, and the session goes on."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator

import pytest

from hearth.session.v1 import session_pb2 as sessions
from hearth.types.v1 import event_pb2
from tests.contract.pool.house import Backend, House, agent_text, eventually, frozen, key, summary
from tests.contract.pool.refusals import refused
from tests.support.servers import Servers

_SCRIPTED = [sys.executable, "-m", "hearth.agents.scripted"]
AGENTS = {
    "missing": {"command": ["/nonexistent/agent"]},
    "exits": {"command": _SCRIPTED, "env": {"HEARTH_SCRIPTED_START": "exit:3"}},
    "hangs": {"command": _SCRIPTED, "env": {"HEARTH_SCRIPTED_START": "hang"}},
    "garbage": {"command": _SCRIPTED, "env": {"HEARTH_SCRIPTED_START": "garbage"}},
}


@pytest.fixture(scope="module")
def house(servers: Servers, module_postgres_dsn: str, module_valkey_url: str) -> Iterator[House]:
    """Services that know bad agents and do not wait long for them."""
    env = {
        "HEARTH_AGENTS": json.dumps(AGENTS),
        "HEARTH_OPEN_TIMEOUT": "3",
        "HEARTH_IDLE_LIMIT": "60",
        "HEARTH_TURN_LIMIT": "120",
    }
    with House(servers.scratch(), module_postgres_dsn, module_valkey_url, env).running() as found:
        yield found


@pytest.mark.parametrize(
    ("agent", "codes"),
    [
        ("missing", {"AGENT_START_FAILED"}),
        ("exits", {"AGENT_EXITED", "AGENT_START_FAILED"}),
        ("hangs", {"AGENT_OPEN_TIMEOUT"}),
        ("garbage", {"AGENT_PROTOCOL"}),
    ],
)
async def test_an_agent_that_cannot_be_opened(backend: Backend, agent: str, codes: set[str]) -> None:
    session = key(agent)
    sent = await backend.send(session, "hello", spec=sessions.SessionSpec(agent=agent))
    execution_id = sent.started.execution.execution_id
    ending = await backend.ending(session, execution_id, timeout=10)
    assert ending.execution_failed.code in codes
    assert ending.execution_failed.message
    settled = await backend.settled(session, execution_id)
    assert settled.outcome == sessions.EXECUTION_OUTCOME_FAILED
    assert settled.failure_code == ending.execution_failed.code
    assert not settled.HasField("started_at")

    async def nothing_runs() -> bool:
        return not await backend.running_sandboxes(session)

    await eventually(nothing_runs)
    after = await backend.run(session, "hello", spec=sessions.SessionSpec(agent="scripted"))
    assert after.HasField("execution_completed")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("stream 5 words\ncrash 3", "AGENT_EXITED"),
        ("stream 5 words\ncrash-silent", "AGENT_EXITED"),
        ("error broken", "AGENT_ERROR"),
        ("empty", "EMPTY_TURN"),
    ],
)
async def test_a_turn_that_fails(backend: Backend, words: str, code: str) -> None:
    session = key()
    await backend.run(session, "hello")
    ending = await backend.run(session, words)
    assert ending.execution_failed.code == code
    events = await backend.events(session)
    own = [event for event in events if event.execution_id == ending.execution_id]
    assert own[-1] == ending
    if words.startswith("stream"):
        cut = [event.message_completed for event in own if event.HasField("message_completed")][-1]
        assert cut.finish_reason == "truncated"
    after = await backend.run(session, "hello")
    assert after.HasField("execution_completed")
    assert summary(after).how in {"cold", "restarted"}


async def test_lines_of_garbage_do_not_end_a_turn(backend: Backend) -> None:
    session = key()
    ending = await backend.run(session, "garbage\nstream 3 words")
    assert ending.HasField("execution_completed")


async def test_a_cancelled_that_nobody_asked_for_is_a_completion(backend: Backend) -> None:
    session = key()
    ending = await backend.run(session, "cancelled-unasked")
    assert ending.execution_completed.finish_reason == "cancelled"
    assert summary(await backend.run(session, "hello")).how == "warm"


async def test_a_silent_agent_is_ended_by_its_limits(backend: Backend) -> None:
    spec = sessions.SessionSpec()
    spec.limits.first_response.FromMilliseconds(500)
    session = key()
    ending = await backend.run(session, "hang", spec=spec)
    assert ending.execution_failed.code == "FIRST_RESPONSE_LIMIT"
    assert not await backend.running_sandboxes(session)
    counting = await backend.run(key(), "commands\nusage\nhang", spec=spec)
    assert counting.execution_failed.code == "FIRST_RESPONSE_LIMIT", "what an agent counts is no answer"
    spec.limits.first_response.FromSeconds(5)
    spec.limits.tool_call.FromMilliseconds(700)
    assert (await backend.run(session, "run sleep 30", spec=spec)).execution_failed.code == "TOOL_LIMIT"
    spec.limits.tool_call.FromSeconds(60)
    spec.limits.idle.FromMilliseconds(700)
    assert (await backend.run(session, "stream 3 words\nhang", spec=spec)).execution_failed.code == "IDLE_LIMIT"
    spec.limits.idle.FromSeconds(60)
    spec.limits.turn.FromSeconds(2)
    long = await backend.run(session, "stream 1000 words at 20/s", spec=spec)
    assert long.execution_failed.code == "TURN_LIMIT"


async def test_limits_begin_with_the_prompt(backend: Backend, house: House) -> None:
    """However long it takes to make a sandbox."""
    spec = sessions.SessionSpec()
    spec.limits.first_response.FromMilliseconds(1000)
    session = key()
    with frozen(house, "sandbox"):
        sent = await backend.send(session, "hello", spec=spec)
        await asyncio.sleep(1.2)
    ending = await backend.ending(session, sent.started.execution.execution_id)
    assert ending.HasField("execution_completed")
    acquire = next(stage for stage in summary(ending).stages if stage.stage == "acquire")
    assert acquire.duration_us > 1_000_000


async def test_what_no_agent_was_asked_is_told_to_the_next(backend: Backend) -> None:
    """An agent that loads its own record hears of what happened in between."""
    session = key()
    await backend.run(session, "remember my name is Ada", spec=sessions.SessionSpec(agent="scripted"))
    failed = await backend.run(session, "remember my town is Bern", spec=sessions.SessionSpec(agent="exits"))
    assert failed.HasField("execution_failed")
    after = await backend.run(
        session, "what is my name?\nwhat is my town?", spec=sessions.SessionSpec(agent="scripted")
    )
    assert next(stage.how for stage in summary(after).stages if stage.stage == "open") == "load"
    said = agent_text(await backend.events(session), after.execution_id)
    assert "Ada" in said
    assert "Bern" in said


async def test_policy_allows_and_denies(backend: Backend) -> None:
    allow = sessions.PermissionPolicy(default_action=sessions.PERMISSION_ACTION_ALLOW)
    deny = sessions.PermissionPolicy(default_action=sessions.PERMISSION_ACTION_DENY)
    for policy, status, decision in (
        (allow, event_pb2.TOOL_STATUS_SUCCEEDED, event_pb2.DECISION_ALLOWED),
        (deny, event_pb2.TOOL_STATUS_DENIED, event_pb2.DECISION_DENIED),
    ):
        session = key()
        spec = sessions.SessionSpec(permissions=policy)
        ending = await backend.run(session, 'ask edit {"path": "x"}', spec=spec)
        assert ending.HasField("execution_completed")
        events = await backend.events(session)
        tools = [event.tool_completed for event in events if event.HasField("tool_completed")]
        assert [tool.status for tool in tools] == [status]
        resolved = [event.interaction_resolved for event in events if event.HasField("interaction_resolved")]
        assert [one.decision for one in resolved] == [decision]
        assert resolved[0].resolution == event_pb2.INTERACTION_RESOLUTION_POLICY
        assert resolved[0].tool_call_id == tools[0].tool_call_id


async def test_rules_go_before_the_default(backend: Backend) -> None:
    session = key()
    policy = sessions.PermissionPolicy(
        default_action=sessions.PERMISSION_ACTION_DENY,
        rules=[sessions.PermissionRule(tool="re*", action=sessions.PERMISSION_ACTION_ALLOW)],
    )
    await backend.run(session, "ask remove {}\nask edit {}", spec=sessions.SessionSpec(permissions=policy))
    tools = [e.tool_completed for e in await backend.events(session) if e.HasField("tool_completed")]
    assert {tool.name: tool.status for tool in tools} == {
        "remove": event_pb2.TOOL_STATUS_SUCCEEDED,
        "edit": event_pb2.TOOL_STATUS_DENIED,
    }


async def test_an_unknown_agent_is_refused(backend: Backend) -> None:
    session = key()
    error = await refused(backend.send(session, "hello", spec=sessions.SessionSpec(agent="nobody")))
    assert error.reason == "UNKNOWN_AGENT"
    assert [field for field, _ in error.field_violations] == ["spec.agent"]
    assert (await refused(backend.session(session))).reason == "SESSION_NOT_FOUND"
