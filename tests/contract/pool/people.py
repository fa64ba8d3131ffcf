"""People who are asked by agents and answer, and what the agents themselves wrote down of it."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hearth.pool.v1 import pool_pb2, pool_service_pb2
from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import event_pb2, session_pb2
from tests.contract.pool.house import Backend, eventually

ALLOWED, DENIED = event_pb2.DECISION_ALLOWED, event_pb2.DECISION_DENIED
AGENT = "asking"
_SCRIPTED = [sys.executable, "-P", "-m", "hearth.agents.scripted"]


def asking(agent_log: Path) -> Mapping[str, str]:
    """Settings of a pool whose agents ask people for everything, and write down what reaches them."""
    agent = {"command": _SCRIPTED, "env": {"HEARTH_SCRIPTED_LOG": str(agent_log)}}
    return {
        "HEARTH_AGENTS": json.dumps({AGENT: agent}),
        "HEARTH_DEFAULT_AGENT": AGENT,
        "HEARTH_DEFAULT_PERMISSION": "ask",
    }


async def asked(
    backend: Backend, session: session_pb2.SessionKey, number: int = 1, *, execution_id: str = ""
) -> list[sessions.Interaction]:
    """Wait until so many interactions of a session wait for an answer, in the order in which they were asked."""

    async def found() -> list[sessions.Interaction] | None:
        pending = [
            one for one in await interactions(backend, session) if one.state == sessions.INTERACTION_STATE_PENDING
        ]
        mine = [one for one in pending if execution_id in {"", one.execution_id}]
        return mine if len(mine) >= number else None

    waiting = await eventually(found)
    assert len(waiting) == number, waiting
    return waiting


async def interactions(backend: Backend, session: session_pb2.SessionKey) -> list[sessions.Interaction]:
    """What was asked in a session, oldest first."""
    request = calls.ListInteractionsRequest(session=session)
    return list((await backend.sessions.ListInteractions(request, timeout=20)).interactions)


async def answer(
    backend: Backend,
    session: session_pb2.SessionKey,
    answers: Mapping[str, event_pb2.Decision.ValueType | str],
    *,
    request_id: str = "",
    by: str = "ada",
) -> calls.AnswerInteractionsResponse:
    """Answer interactions, each with a decision or with JSON."""
    request = calls.AnswerInteractionsRequest(
        session=session, request_id=request_id or str(uuid.uuid4()), answered_by=by
    )
    for interaction_id, given in answers.items():
        one = request.answers.add(interaction_id=interaction_id)
        if isinstance(given, str):
            one.answer_json = given
        else:
            one.decision = given
    response: calls.AnswerInteractionsResponse = await backend.sessions.AnswerInteractions(request, timeout=20)
    return response


async def state_of(backend: Backend, session: session_pb2.SessionKey) -> str:
    """What the entry of a session is doing; empty without one."""
    found = (await backend.pools.ListEntries(pool_service_pb2.ListEntriesRequest(), timeout=20)).entries
    states = [pool_pb2.EntryState.Name(one.state) for one in found if one.session == session]
    return states[0].removeprefix("ENTRY_STATE_") if states else ""


async def resolved(backend: Backend, session: session_pb2.SessionKey) -> dict[str, event_pb2.InteractionResolved]:
    """How interactions came to their end, as readers are told."""
    found = [e.interaction_resolved for e in await backend.events(session) if e.HasField("interaction_resolved")]
    assert len({one.interaction_id for one in found}) == len(found), found
    return {one.interaction_id: one for one in found}


async def continuation(backend: Backend, session: session_pb2.SessionKey, source_execution_id: str) -> event_pb2.Event:
    """Wait for the start of the execution that goes on with another."""

    async def found() -> event_pb2.Event | None:
        started = [
            event
            for event in await backend.events(session)
            if event.execution_started.source_execution_id == source_execution_id and event.execution_id
        ]
        assert len(started) <= 1, started
        return started[0] if started else None

    return await eventually(found)


async def tools_of(backend: Backend, session: session_pb2.SessionKey, execution_id: str) -> dict[str, str]:
    """How each tool call of an execution ended, by its id."""
    own = [event for event in await backend.events(session) if event.execution_id == execution_id]
    return {
        e.tool_completed.tool_call_id: event_pb2.ToolStatus.Name(e.tool_completed.status).removeprefix("TOOL_STATUS_")
        for e in own
        if e.HasField("tool_completed")
    }


class Journal:
    """What the agents of a house wrote down."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def of(self, execution_id: str, event: str) -> list[dict[str, Any]]:
        """What happened in the prompt of an execution, of one kind."""
        return [line for line in self._prompt(execution_id) if line["event"] == event]

    def ran(self, execution_id: str) -> list[str]:
        """The tools that ran in the prompt of an execution."""
        return [line["tool"] for line in self.of(execution_id, "tool")]

    def told(self, execution_id: str) -> str:
        """The prompt of an execution as the agent got it."""
        prompts = self.of(execution_id, "prompt")
        assert len(prompts) == 1, prompts
        return str(prompts[0]["text"])

    def _prompt(self, execution_id: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self._path.read_text().splitlines()]
        sessions_of = {line["session"] for line in lines if line.get("message_id") == execution_id}
        found, inside = [], False
        for line in lines:
            if line["session"] not in sessions_of:
                continue
            if line["event"] == "prompt":
                inside = line["message_id"] == execution_id
            if inside:
                found.append(line)
        return found
