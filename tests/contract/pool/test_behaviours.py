"""Behaviours of tests/behaviours.toml that show at the pool's own interface: permissions that a policy decides, a Stop,
and what a request must bring before anything is acquired for it."""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from hearth.client import Addresses, Client
from hearth.pool.v1 import pool_service_pb2
from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import content_pb2, event_pb2, session_pb2
from services.pool.sealing import new_key
from tests.contract.pool.house import (
    Backend,
    House,
    agent_text,
    eventually,
    frozen,
    is_ending,
    key,
    summary,
    text_content,
)
from tests.contract.pool.refusals import refused
from tests.support.servers import Servers

_SCRIPTED = [sys.executable, "-P", "-m", "hearth.agents.scripted"]
QUEUE_CAP = 2
POLICY = sessions.PermissionPolicy(
    default_action=sessions.PERMISSION_ACTION_DENY,
    rules=[sessions.PermissionRule(tool="search", action=sessions.PERMISSION_ACTION_ALLOW)],
)
LOGGED = sessions.SessionSpec(agent="logged", permissions=POLICY)


@pytest.fixture(scope="module")
def agent_log(servers: Servers) -> Path:
    """Where the agents of this module write down what reaches them."""
    return servers.scratch() / "agents.jsonl"


@pytest.fixture(scope="module")
def house(servers: Servers, module_postgres_dsn: str, module_valkey_url: str, agent_log: Path) -> Iterator[House]:
    """Services with an agent that writes down what reaches it, and a short queue."""
    agent = {"command": _SCRIPTED, "env": {"HEARTH_SCRIPTED_LOG": str(agent_log)}}
    env = {
        "HEARTH_AGENTS": json.dumps({"logged": agent, "other": agent, "broken": {"command": ["/nonexistent/agent"]}}),
        "HEARTH_QUEUE_CAP": str(QUEUE_CAP),
        "HEARTH_SECRET_KEY": new_key(),
    }
    with House(servers.scratch(), module_postgres_dsn, module_valkey_url, env).running() as found:
        yield found


def reached(agent_log: Path, agent_pid: int, event: str) -> list[dict[str, Any]]:
    """What reached an agent process."""
    lines = [json.loads(line) for line in agent_log.read_text().splitlines()]
    return [line for line in lines if line["pid"] == agent_pid and line["event"] == event]


def pid_of(ending: event_pb2.Event) -> int:
    """The process that answered a turn."""
    return int(json.loads(summary(ending).agent_report_json)["hearth.dev/agent"]["pid"])


async def tools_of(backend: Backend, ending: event_pb2.Event, session: session_pb2.SessionKey) -> dict[str, int]:
    """Status of each tool call of a turn, by name."""
    own = [event for event in await backend.events(session) if event.execution_id == ending.execution_id]
    return {e.tool_completed.name: e.tool_completed.status for e in own if e.HasField("tool_completed")}


async def resolved_of(
    backend: Backend, ending: event_pb2.Event, session: session_pb2.SessionKey
) -> list[event_pb2.InteractionResolved]:
    """What readers were told of the questions of a turn."""
    own = [event for event in await backend.events(session) if event.execution_id == ending.execution_id]
    return [event.interaction_resolved for event in own if event.HasField("interaction_resolved")]


async def test_w_a02_w_a13_w_a17_a_denial_reaches_the_live_agent_and_an_allowed_call_runs_once(
    backend: Backend, agent_log: Path
) -> None:
    session = key()
    first = await backend.run(session, "hello", spec=LOGGED)
    ending = await backend.run(session, 'ask search {"for": "x"}\nask remove {}')
    assert summary(ending).how == "warm"
    assert pid_of(ending) == pid_of(first)
    asked = reached(agent_log, pid_of(ending), "permission")
    assert [(line["tool"], line["outcome"]) for line in asked] == [("search", "allow_once"), ("remove", "reject_once")]
    assert [line["tool"] for line in reached(agent_log, pid_of(ending), "tool")] == ["search"]
    assert await tools_of(backend, ending, session) == {
        "search": event_pb2.TOOL_STATUS_SUCCEEDED,
        "remove": event_pb2.TOOL_STATUS_DENIED,
    }
    # The turn went on after both, and its agent takes the next one.
    assert ending.HasField("execution_completed")
    assert summary(await backend.run(session, "hello")).how == "warm"


async def test_w_a03_w_a16_questions_asked_together_are_answered_and_told_each_by_its_own_id(
    backend: Backend, agent_log: Path
) -> None:
    session = key()
    words = 'parallel ask search {"n": 1}\nparallel ask remove {"n": 2}\nparallel ask search {"n": 3}'
    ending = await backend.run(session, words, spec=LOGGED)
    asked = reached(agent_log, pid_of(ending), "permission")
    outcomes = {line["tool_call_id"]: line["outcome"] for line in asked}
    assert len(outcomes) == 3
    told = await resolved_of(backend, ending, session)
    assert {one.tool_call_id: one.decision for one in told} == {
        call: event_pb2.DECISION_ALLOWED if outcome == "allow_once" else event_pb2.DECISION_DENIED
        for call, outcome in outcomes.items()
    }
    assert len({one.interaction_id for one in told}) == len(told) == 3
    assert {one.decided_by for one in told} == {"policy"}
    assert {one.resolution for one in told} == {event_pb2.INTERACTION_RESOLUTION_POLICY}


async def test_w_a20_a_live_agent_goes_on_while_the_log_is_away(backend: Backend, house: House) -> None:
    session = key()
    await backend.run(session, "hello")
    sent = await backend.send(session, "stream 40 words at 40/s")
    execution_id = sent.started.execution.execution_id

    async def asked() -> bool:
        found = await backend.execution(session, execution_id)
        return found.state == sessions.EXECUTION_STATE_RUNNING

    await eventually(asked)
    with frozen(house, "history"):
        # Nothing of this turn can be written down now; its execution stays as it is until that is possible again.
        assert (await backend.execution(session, execution_id)).state == sessions.EXECUTION_STATE_RUNNING
    ending = await backend.ending(session, execution_id)
    assert ending.HasField("execution_completed")
    assert len(agent_text(await backend.events(session), execution_id).split()) == 40


async def test_w_a21_a_stop_is_no_error_and_open_calls_are_cancelled(backend: Backend, agent_log: Path) -> None:
    session = key()
    first = await backend.run(session, "hello", spec=LOGGED)
    sent = await backend.send(session, "run sleep 60")
    execution_id = sent.started.execution.execution_id

    async def began() -> bool:
        prompts = reached(agent_log, pid_of(first), "prompt")
        return any(line["message_id"] == execution_id for line in prompts)

    await eventually(began)
    await backend.stop(session, execution_id)
    ending = await backend.ending(session, execution_id)
    assert ending.execution_stopped.reason == "user"
    assert set((await tools_of(backend, ending, session)).values()) <= {event_pb2.TOOL_STATUS_CANCELLED}
    assert (await backend.settled(session, execution_id)).failure_code == ""


async def test_w_c06_the_same_configuration_saved_again_keeps_the_agent(backend: Backend) -> None:
    session = key()

    def revision(seconds: int) -> sessions.SessionSpec:
        made = sessions.SessionSpec(agent="logged", model="m", instructions="be brief", permissions=POLICY)
        # What an agent is not made from may differ.
        made.limits.turn.FromSeconds(seconds)
        return made

    first = await backend.run(session, "hello", spec=revision(600))
    for seconds in (600, 700):
        again = await backend.run(session, "hello", spec=revision(seconds))
        assert summary(again).how == "warm"
        assert pid_of(again) == pid_of(first)


async def test_w_d03_two_sessions_never_share_an_agent(backend: Backend) -> None:
    one, other = key(), key()
    first = await backend.run(one, "remember my name is Ada")
    second = await backend.run(other, "what is my name?")
    assert pid_of(first) != pid_of(second)
    assert summary(first).sandbox_id != summary(second).sandbox_id
    assert "Ada" not in agent_text(await backend.events(other), second.execution_id)


async def test_w_c12_w_d07_without_a_whole_key_nothing_is_acquired(
    backend: Backend, database: asyncpg.Connection[asyncpg.Record]
) -> None:
    before = await database.fetchval("SELECT count(*) FROM sandbox.sandboxes")
    sessions_before = await database.fetchval("SELECT count(*) FROM pool.session")
    for wrong, field in (
        (session_pb2.SessionKey(project="acme"), "session.session"),
        (session_pb2.SessionKey(session="s"), "session.project"),
        (session_pb2.SessionKey(project=" ", session="s"), "session.project"),
    ):
        error = await refused(backend.send(wrong, "hello"))
        assert error.reason == "INVALID_FIELD"
        assert [name for name, _ in error.field_violations] == [field]
    assert await database.fetchval("SELECT count(*) FROM sandbox.sandboxes") == before
    assert await database.fetchval("SELECT count(*) FROM pool.session") == sessions_before


async def test_w_c12_one_session_id_in_two_projects_is_two_sessions(backend: Backend) -> None:
    name = f"same-{uuid.uuid4().hex[:8]}"
    here, there = (session_pb2.SessionKey(project=project, session=name) for project in ("acme", "zeta"))
    first = await backend.run(here, "remember my name is Ada")
    second = await backend.run(there, "what is my name?")
    assert summary(second).sandbox_id != summary(first).sandbox_id
    assert "Ada" not in agent_text(await backend.events(there), second.execution_id)


async def test_w_d08_a_turn_that_was_given_up_is_not_continued_and_a_reader_who_leaves_gives_nothing_up(
    backend: Backend, house: House
) -> None:
    session = key()
    first = await backend.run(session, "hello")
    sent = await backend.send(session, "stream 60 words at 60/s")
    where = Addresses(*(house.processes[name].address for name in ("pool", "history", "relay", "sandbox")))
    async with Client(where) as client:
        async for item in client.watch(session):
            if item.HasField("frame"):
                break
    read = await backend.ending(session, sent.started.execution.execution_id)
    assert read.HasField("execution_completed")
    again = await backend.run(session, "who are you?")
    assert pid_of(again) == pid_of(first)
    failed = await backend.run(session, "stream 3 words\nerror broken")
    assert failed.HasField("execution_failed")
    after = await backend.run(session, "who are you?")
    assert summary(after).how == "cold"
    assert pid_of(after) != pid_of(first)


async def test_w_d09_w_d16_what_comes_meanwhile_waits_or_is_refused_and_never_runs_beside(
    backend: Backend, agent_log: Path
) -> None:
    session = key()
    running = await backend.send(session, "fs-write kept.txt of the first\nstream 3000 words at 100/s", spec=LOGGED)
    execution_id = running.started.execution.execution_id
    waiting = await backend.send(session, "read kept.txt")
    assert waiting.HasField("queued")
    refusal = await refused(backend.send(session, "hello", on_busy=sessions.ON_BUSY_REJECT))
    assert refusal.reason == "SESSION_BUSY"

    async def began() -> bool:
        return any(execution_id in line for line in agent_log.read_text().splitlines()) if agent_log.exists() else False

    await eventually(began)
    # The first turn was a cold one and is stopped in the middle; what waits comes into the files that it left.
    await backend.stop(session, execution_id)
    stopped = await backend.ending(session, execution_id)
    assert stopped.HasField("execution_stopped")
    await backend.settled(session, execution_id)
    resumed = await backend.sessions.ResumeQueue(
        calls.ResumeQueueRequest(session=session, request_id="go on"), timeout=20
    )
    second = await backend.ending(session, resumed.started.execution.execution_id)
    assert "of the first" in agent_text(await backend.events(session), second.execution_id)
    third = await backend.run(session, "read kept.txt")
    assert "of the first" in agent_text(await backend.events(session), third.execution_id)
    # One after the other: between two prompts there is the ending of the first.
    order = [
        (event.execution_id, event.WhichOneof("body"))
        for event in await backend.events(session)
        if event.HasField("execution_started") or is_ending(event, event.execution_id)
    ]
    assert [name for name, _ in order] == [
        id_ for turn in (stopped, second, third) for id_ in (turn.execution_id, turn.execution_id)
    ]


async def test_w_e03_epochs_count_turns_however_they_are_got_and_each_has_one_ending(backend: Backend) -> None:
    session = key()
    hows = []
    for turn in range(1, 5):
        ending = await backend.run(session, "hello")
        hows.append(summary(ending).how)
        execution = await backend.settled(session, ending.execution_id)
        assert execution.epoch == turn
        await backend.idle_entry(session)
        if turn % 2 == 0:
            evict = pool_service_pb2.EvictEntryRequest(session=session, request_id=f"evict-{turn}")
            await backend.pools.EvictEntry(evict, timeout=30)
    assert hows == ["cold", "warm", "restarted", "warm"]
    events = await backend.events(session)
    endings = [event.execution_id for event in events if is_ending(event, event.execution_id)]
    assert len(endings) == len(set(endings)) == 4


async def test_w_c09_text_alone_and_media_alone_are_messages_and_nothing_is_none(backend: Backend) -> None:
    media = content_pb2.ContentPart(inline_media=content_pb2.InlineMediaPart(media_type="image/png", data=b"png"))
    session = key()
    for content in ([media], text_content("hello")):
        request = calls.SendInputRequest(session=session, request_id=str(uuid.uuid4()), content=content)
        sent = await backend.sessions.SendInput(request, timeout=20)
        ending = await backend.ending(session, sent.started.execution.execution_id)
        assert ending.HasField("execution_completed")
    for empty in ([], text_content(""), text_content(" \n\t")):
        request = calls.SendInputRequest(session=session, request_id=str(uuid.uuid4()), content=empty)
        error = await refused(backend.sessions.SendInput(request, timeout=20))
        assert error.reason == "INVALID_FIELD"
    assert (await backend.session(session)).epoch == 2


async def test_w_d02_tools_are_part_of_the_conversation_and_answers_are_not(backend: Backend) -> None:
    def user(text: str) -> sessions.TranscriptEntry:
        return sessions.TranscriptEntry(user_message=sessions.TranscriptUserMessage(text=text))

    session = key()
    await backend.run(session, "tool probe {}\nstream 3 words")
    events = await backend.events(session)
    call = next(event.tool_completed.tool_call_id for event in events if event.HasField("tool_completed"))
    tool = sessions.TranscriptEntry(tool_call_id=call)
    # What the agent said is not in it at all, so a caller that threw an answer away sees the same conversation.
    seen = [user("tool probe {}\nstream 3 words"), tool]
    second = await backend.run(session, "hello", expected=sessions.ExpectedTranscript(entries=seen))
    other = [seen[0], sessions.TranscriptEntry(tool_call_id="another"), user("hello")]
    third = await backend.run(session, "more", expected=sessions.ExpectedTranscript(entries=other))
    assert [summary(turn).how for turn in (second, third)] == ["warm", "restarted"]


async def test_w_e06_who_knows_the_conversation_gets_the_new_message_only_and_others_are_told_it(
    backend: Backend, agent_log: Path
) -> None:
    session = key()
    told = ["remember my name is Ada", "what is my name?", "what is my name now?"]
    turns = [await backend.run(session, told[0], spec=LOGGED)]
    turns.append(await backend.run(session, told[1]))
    await backend.idle_entry(session)
    evict = pool_service_pb2.EvictEntryRequest(session=session, request_id="evict")
    await backend.pools.EvictEntry(evict, timeout=30)
    turns.append(await backend.run(session, told[2]))
    assert [summary(turn).how for turn in turns] == ["cold", "warm", "restarted"]
    # Another agent has no record of its own, and knows what it was told of the conversation.
    other = await backend.run(session, "what is my name?", spec=sessions.SessionSpec(agent="other", permissions=POLICY))
    assert {stage.stage: stage.how for stage in summary(other).stages}["open"] == "new"
    assert "Ada" in agent_text(await backend.events(session), other.execution_id)
    prompts = [prompt["text"] for turn in (*turns, other) for prompt in reached(agent_log, pid_of(turn), "prompt")]
    # The first process had two turns, and is listed for each.
    with_context = "[resource hearth:context]\nwhat is my name?"
    assert prompts == [told[0], told[1], told[0], told[1], told[2], with_context]


async def test_w_e07_a_configuration_that_failed_to_be_applied_does_not_count_as_applied(backend: Backend) -> None:
    session = key()
    one = sessions.SessionSpec(agent="logged", instructions="one", permissions=POLICY)
    await backend.run(session, "hello", spec=one)
    broken = sessions.SessionSpec(agent="broken", instructions="two")
    assert (await backend.run(session, "hello", spec=broken)).HasField("execution_failed")
    # The agent of the first is gone, and nothing of the second is there: both start anew.
    assert (await backend.run(session, "hello", spec=broken)).HasField("execution_failed")
    back = await backend.run(session, "hello", spec=one)
    assert summary(back).how in ("cold", "restarted")
    assert summary(await backend.run(session, "hello", spec=one)).how == "warm"


async def test_every_turn_that_is_not_warm_has_its_reason(backend: Backend) -> None:
    async def stats() -> tuple[dict[str, int], dict[str, int]]:
        found = await backend.pools.GetPoolStats(pool_service_pb2.GetPoolStatsRequest(), timeout=20)
        return dict(found.turns_by_how), dict(found.misses_by_reason)

    async def at_work() -> int:
        found = await backend.pools.GetPoolStats(pool_service_pb2.GetPoolStatsRequest(), timeout=20)
        return found.entries_by_state["BUSY"]

    # A turn is counted once it is settled, which its reader does not see: those of other tests are to be over.
    while await at_work():  # noqa: ASYNC110 - only asking tells
        await asyncio.sleep(0.02)
    hows, misses = await stats()
    session = key()
    for text in ("hello", "hello again"):
        await backend.run(session, text)
        await backend.idle_entry(session)
    evict = pool_service_pb2.EvictEntryRequest(session=session, request_id="evict")
    await backend.pools.EvictEntry(evict, timeout=30)
    last = await backend.run(session, "hello")
    await backend.settled(session, last.execution_id)
    await backend.idle_entry(session)
    hows_after, misses_after = await stats()
    assert {how: hows_after[how] - hows.get(how, 0) for how in hows_after if hows_after[how] != hows.get(how, 0)} == {
        "cold": 1,
        "warm": 1,
        "restarted": 1,
    }
    changed = {why: count - misses.get(why, 0) for why, count in misses_after.items() if count != misses.get(why, 0)}
    assert changed == {"first-turn": 1, "not-kept": 1}


async def test_w_d12_the_id_of_an_execution_comes_before_its_sandbox(backend: Backend, house: House) -> None:
    session = key()
    with frozen(house, "sandbox"):
        sent = await backend.send(session, "hello")
        execution_id = sent.started.execution.execution_id
        assert uuid.UUID(execution_id)
        assert (await backend.execution(session, execution_id)).state == sessions.EXECUTION_STATE_PENDING
    assert (await backend.ending(session, execution_id)).HasField("execution_completed")


async def test_w_k01_a_kill_takes_what_its_session_has_and_nothing_of_another_project(backend: Backend) -> None:
    name = f"killed-{uuid.uuid4().hex[:8]}"
    here, there = (session_pb2.SessionKey(project=project, session=name) for project in ("acme", "zeta"))
    for session in (here, there):
        await backend.run(session, "hello")
        await backend.idle_entry(session)
    await backend.sessions.KillSession(calls.KillSessionRequest(session=here, request_id="kill"), timeout=30)
    assert not await backend.running_sandboxes(here)
    assert len(await backend.running_sandboxes(there)) == 1
    assert summary(await backend.run(there, "hello")).how == "warm"
    # A session that never had an agent, and one whose agent is gone, may be killed as well.
    again = calls.KillSessionRequest(session=here, request_id="kill again")
    await backend.sessions.KillSession(again, timeout=30)
    assert (await backend.run(here, "hello")).HasField("execution_completed")


async def test_w_k02_a_malformed_kill_changes_nothing_and_a_repeated_one_is_answered_as_the_first(
    backend: Backend,
) -> None:
    session = key()
    await backend.run(session, "hello")
    for request, field in (
        (calls.KillSessionRequest(session=session), "request_id"),
        (calls.KillSessionRequest(session=session_pb2.SessionKey(project="acme"), request_id="k"), "session.session"),
    ):
        error = await refused(backend.sessions.KillSession(request))
        assert [name for name, _ in error.field_violations] == [field]
    assert summary(await backend.run(session, "hello")).how == "warm"
    request = calls.KillSessionRequest(session=session, request_id="kill")
    first = (await backend.sessions.KillSession(request, timeout=30)).session
    second = (await backend.sessions.KillSession(request, timeout=30)).session
    assert first.epoch == second.epoch


async def test_w_k04_beyond_the_bound_a_message_is_refused_and_room_comes_back(backend: Backend) -> None:
    session = key()
    running = await backend.send(session, "stream 3000 words at 100/s")
    execution_id = running.started.execution.execution_id
    for _ in range(QUEUE_CAP):
        assert (await backend.send(session, "hello")).HasField("queued")
    error = await refused(backend.send(session, "one too many"))
    assert error.reason == "QUEUE_FULL"
    assert (await backend.session(session)).queued_inputs == QUEUE_CAP
    await backend.stop(session, execution_id)
    await backend.settled(session, execution_id)
    await backend.sessions.ResumeQueue(calls.ResumeQueueRequest(session=session, request_id="go on"), timeout=20)

    async def room() -> bool:
        return (await backend.session(session)).queued_inputs < QUEUE_CAP

    await eventually(room)
    sent = await backend.send(session, "now there is room")
    assert sent.WhichOneof("result") in ("queued", "started")
