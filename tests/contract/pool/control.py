"""What the tests of Stop, queue and steer do with a backend besides sending."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TypeAlias

import asyncpg

from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import event_pb2, session_pb2
from tests.contract.pool.house import Backend, eventually, is_ending, text_content

Database: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

# What an agent does until it is stopped.
LONG = "stream 6000 words at 60/s"


async def running(backend: Backend, session: session_pb2.SessionKey, execution_id: str) -> sessions.Execution:
    """Wait until the agent was asked."""

    async def found() -> sessions.Execution | None:
        execution = await backend.execution(session, execution_id)
        return execution if execution.state == sessions.EXECUTION_STATE_RUNNING else None

    return await eventually(found)


async def busy(backend: Backend, session: session_pb2.SessionKey, text: str = LONG) -> sessions.Execution:
    """A turn that goes on until it is stopped."""
    sent = await backend.send(session, text)
    assert sent.HasField("started"), sent
    return await running(backend, session, sent.started.execution.execution_id)


async def steer(
    backend: Backend, session: session_pb2.SessionKey, text: str, *, request_id: str = "", meant: str = ""
) -> calls.SendInputResponse:
    """Send a message that is to run instead of what runs."""
    request = calls.SendInputRequest(
        session=session,
        request_id=request_id or str(uuid.uuid4()),
        content=text_content(text),
        on_busy=sessions.ON_BUSY_STEER,
        steer_execution_id=meant,
    )
    response: calls.SendInputResponse = await backend.sessions.SendInput(request, timeout=20)
    return response


async def send_now(
    backend: Backend, session: session_pb2.SessionKey, input_id: str, *, request_id: str = "", meant: str = ""
) -> calls.SendInputNowResponse:
    """Run an input that waits before all others."""
    request = calls.SendInputNowRequest(
        session=session, request_id=request_id or str(uuid.uuid4()), input_id=input_id, execution_id=meant
    )
    response: calls.SendInputNowResponse = await backend.sessions.SendInputNow(request, timeout=20)
    return response


async def remove(backend: Backend, session: session_pb2.SessionKey, input_id: str) -> sessions.Input:
    """Take an input out of the queue."""
    request = calls.RemoveInputRequest(session=session, request_id=str(uuid.uuid4()), input_id=input_id)
    removed: sessions.Input = (await backend.sessions.RemoveInput(request, timeout=20)).input
    return removed


async def edit(backend: Backend, session: session_pb2.SessionKey, input_id: str, text: str) -> sessions.Input:
    """Replace the text of an input that waits."""
    request = calls.UpdateInputRequest(
        session=session, request_id=str(uuid.uuid4()), input_id=input_id, content=text_content(text)
    )
    edited: sessions.Input = (await backend.sessions.UpdateInput(request, timeout=20)).input
    return edited


async def resume(backend: Backend, session: session_pb2.SessionKey) -> calls.ResumeQueueResponse:
    """Let a paused queue go on."""
    request = calls.ResumeQueueRequest(session=session, request_id=str(uuid.uuid4()))
    response: calls.ResumeQueueResponse = await backend.sessions.ResumeQueue(request, timeout=20)
    return response


async def inputs(backend: Backend, session: session_pb2.SessionKey) -> list[sessions.Input]:
    """Inputs that wait, by rank, after those whose run has not reached the agent."""
    response = await backend.sessions.ListInputs(calls.ListInputsRequest(session=session), timeout=20)
    return list(response.inputs)


async def waiting(backend: Backend, session: session_pb2.SessionKey) -> list[str]:
    """Ids of the inputs that wait, by rank."""
    found = [one for one in await inputs(backend, session) if one.state == sessions.INPUT_STATE_PENDING]
    assert [one.rank for one in found] == list(range(1, len(found) + 1))
    return [one.input_id for one in found]


async def quiet(backend: Backend, session: session_pb2.SessionKey, executions: int) -> list[event_pb2.Event]:
    """Wait until that many executions have ended and nothing runs; the log."""

    async def found() -> list[event_pb2.Event] | None:
        shown = await backend.session(session)
        if shown.execution.state != sessions.EXECUTION_STATE_TERMINAL:
            return None
        events = await backend.events(session)
        ended = {event.execution_id for event in events if is_ending(event, event.execution_id)}
        return events if len(ended) == executions else None

    return await eventually(found)


def started(events: Sequence[event_pb2.Event]) -> list[str]:
    """Inputs in the order in which their executions were started."""
    return [event.execution_started.input_id for event in events if event.HasField("execution_started")]
